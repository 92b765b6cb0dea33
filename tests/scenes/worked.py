"""The worked examples of the documents, as scenes: at a time, the places where entry A has been."""

WORKED = [
    ("kind=simple&size=20&do=0:add:2", 0, [(0, 1, 2)]),
    ("kind=simple&size=20&do=2:add:8", 2, [(2, 1, 10)]),
    ("kind=simple&size=20&do=2:add:19", 2, [(2, 1, 1)]),
    ("kind=simple&size=60&do=20:add:50", 20, [(20, 1, 10)]),
    ("kind=simple&size=8&do=2:add:3", 2, [(2, 1, 5)]),
    ("kind=wheel&size=20&do=2:add:22", 24, [(2, 2, 1), (20, 1, 4)]),
    ("kind=wheel&size=20&do=2:add:350", 2, [(2, 2, 17)]),
    ("kind=wheel&size=20&do=0:add:450", 450, [(0, 3, 1), (400, 2, 2), (440, 1, 10)]),
    ("kind=wheel&size=20&do=0:add:200", 0, [(0, 2, 10)]),
    ("kind=wheel&size=20&do=2:add:399", 2, [(2, 2, 0)]),
    ("kind=wheel&size=20&do=1:add:19", 1, [(1, 1, 0)]),
    ("kind=wheel&size=20&do=1:add:20", 1, [(1, 2, 1)]),
    ("kind=wheel&sizes=60.60.12&do=0:add:350", 350, [(0, 2, 5), (300, 1, 50)]),
    (
        "kind=wheel&sizes=60.60.12&do=0:add:25000",
        25_000,
        [(0, 3, 6), (21_600, 2, 56), (24_960, 1, 40)],
    ),
    ("kind=wheel&sizes=8.8.8&do=0:add:5", 0, [(0, 1, 5)]),
    ("kind=wheel&sizes=8.8.8&do=0:add:50", 50, [(0, 2, 6), (48, 1, 2)]),
    ("kind=wheel&sizes=8.8.8&do=0:add:250", 250, [(0, 3, 3), (192, 2, 7), (248, 1, 2)]),
    (
        "kind=wheel&sizes=8.8.8&overflow=memory&do=0:add:600",
        600,
        [(0, 0, 0), (128, 3, 1), (576, 2, 3)],
    ),
]
