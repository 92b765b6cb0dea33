"""The worked examples of the documents, as scenes.

`WORKED` has the places where entry A is, each with the time of its arrival, and the time at which
it fires. Level 0 is the overflow buffer.
"""

WORKED = [
    ("kind=simple&size=20&do=0:add:2", [(0, 1, 2)], 2),
    ("kind=simple&size=20&do=2:add:8", [(2, 1, 10)], 10),
    ("kind=simple&size=20&do=2:add:19", [(2, 1, 1)], 21),
    ("kind=simple&size=60&do=0:add:20", [(0, 1, 20)], 20),
    ("kind=simple&size=60&do=20:add:50", [(20, 1, 10)], 70),
    ("kind=simple&size=8&do=2:add:3", [(2, 1, 5)], 5),
    ("kind=rounds&size=8&do=0:add:8", [(0, 1, 0)], 8),
    ("kind=rounds&size=8&do=0:add:10", [(0, 1, 2)], 10),
    ("kind=rounds&size=8&do=0:add:16", [(0, 1, 0)], 16),
    ("kind=wheel&size=20&do=2:add:22", [(2, 2, 1), (20, 1, 4)], 24),
    ("kind=wheel&size=20&do=0:add:350", [(0, 2, 17), (340, 1, 10)], 350),
    ("kind=wheel&size=20&do=2:add:350", [(2, 2, 17), (340, 1, 12)], 352),
    ("kind=wheel&size=20&do=0:add:450", [(0, 3, 1), (400, 2, 2), (440, 1, 10)], 450),
    ("kind=wheel&size=20&do=0:add:200", [(0, 2, 10)], 200),
    ("kind=wheel&size=20&do=1:add:399", [(1, 2, 0)], 400),
    ("kind=wheel&size=20&do=2:add:399", [(2, 2, 0), (400, 1, 1)], 401),
    ("kind=wheel&size=20&do=1:add:19", [(1, 1, 0)], 20),
    ("kind=wheel&size=20&do=1:add:20", [(1, 2, 1), (20, 1, 1)], 21),
    ("kind=wheel&sizes=60.60.12&do=0:add:350", [(0, 2, 5), (300, 1, 50)], 350),
    (
        "kind=wheel&sizes=60.60.12&do=0:add:25000",
        [(0, 3, 6), (21_600, 2, 56), (24_960, 1, 40)],
        25_000,
    ),
    (
        "kind=wheel&sizes=60.60.24&do=0:add:25000",
        [(0, 3, 6), (21_600, 2, 56), (24_960, 1, 40)],
        25_000,
    ),
    ("kind=wheel&sizes=8.8.8&do=0:add:5", [(0, 1, 5)], 5),
    ("kind=wheel&sizes=8.8.8&do=0:add:50", [(0, 2, 6), (48, 1, 2)], 50),
    ("kind=wheel&sizes=8.8.8&do=0:add:250", [(0, 3, 3), (192, 2, 7), (248, 1, 2)], 250),
    (
        "kind=wheel&sizes=8.8.8&overflow=memory&do=0:add:600",
        [(0, 0, 0), (128, 3, 1), (576, 2, 3)],
        600,
    ),
]
ROUNDS = [(8, 0), (10, 1), (16, 1)]  # of an entry with this delay, on a wheel of size 8
WAKEUPS = [(399, 2), (400, 1), (450, 3)]  # of the precise driver, for one entry with this delay
