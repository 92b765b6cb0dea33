"""The worked examples of the documents on timing wheels, as scenes.

Each is the query of a link: the options of `scenes.show`, with a time that is worth a look.
"""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """A scene with a title and a sentence that says what to watch."""

    group: str
    title: str
    about: str
    scene: dict[str, str]


def _scene(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split("&"))


PRESETS = [
    Preset(
        "One wheel", "Slots and reuse",
        "Size 20. At 2, a delay of 8 takes slot 10, 19 reuses slot 1, and 22 does not fit.",
        _scene("kind=simple&size=20&do=0:add:2,2:add:8,2:add:19,2:add:22&at=2"),
    ),
    Preset(
        "One wheel", "A minute of seconds",
        "Size 60. A delay of 20 takes slot 20; at 20, a delay of 50 takes slot 10.",
        _scene("kind=simple&size=60&do=0:add:20,20:add:50&at=20"),
    ),
    Preset(
        "One wheel", "Rounds",
        "Size 8, as in Netty. A delay of 10 waits one round in slot 2: the pointer passes it once.",
        _scene("kind=rounds&size=8&do=0:add:8,0:add:10,0:add:16&at=0"),
    ),
    Preset(
        "Hierarchy", "350 and 450",
        "Size 20. 350 goes to level 2; 450 goes to level 3, and is demoted at 400 and at 440.",
        _scene("kind=wheel&size=20&do=0:add:350,0:add:450&at=0"),
    ),
    Preset(
        "Hierarchy", "24, demoted once",
        "At 2, a delay of 22 goes to level 2, slot 1. At 20 it has 4 left: level 1, slot 4.",
        _scene("kind=wheel&size=20&do=2:add:22&at=2"),
    ),
    Preset(
        "Hierarchy", "A slot is free as soon as the pointer leaves it",
        "At 2, an entry due at 401 takes level 2, slot 0: its first span is over up to 2.",
        _scene("kind=wheel&size=20&do=2:add:399&at=2"),
    ),
    Preset(
        "Hierarchy", "Seconds, minutes, hours",
        "60, 60 and 12 slots. 25,000 seconds: hours, then minutes at 21,600, seconds at 24,960.",
        _scene("kind=wheel&sizes=60.60.12&do=0:add:25000,0:add:350&at=0"),
    ),
    Preset(
        "Hierarchy", "Eight by eight by eight",
        "24 slots hold 512 ticks: 5 on level 1, 50 on level 2, 250 on level 3.",
        _scene("kind=wheel&sizes=8.8.8&do=0:add:5,0:add:50,0:add:250&at=0"),
    ),
    Preset(
        "Hierarchy", "Overflow buffer",
        "600 does not fit into 512. The buffer keeps it until 128; then it has 472 left.",
        _scene("kind=wheel&sizes=8.8.8&overflow=memory&do=0:add:600&at=0"),
    ),
    Preset(
        "Drivers", "Wake-ups of one entry",
        "399 costs the precise driver two wake-ups; the ticking driver wakes 399 times.",
        _scene("kind=wheel&size=20&do=0:add:399&at=399"),
    ),
    Preset(
        "Uses", "Idle connections",
        "A user is offline after 30 silent seconds. A packet only stamps the user.",
        _scene(
            "kind=idle&timeout=30&do=0:packet:ann,0:packet:bob,4:packet:cid,12:packet:ann,"
            "25:packet:bob,40:packet:ann&at=26"
        ),
    ),
    Preset(
        "Uses", "Purgatory",
        "A produce request waits for the acknowledgements of its replicas, or for its deadline.",
        _scene(
            "kind=purgatory&do=0:wait:orders:3:30,1:event:orders,2:wait:fetch:2:8,"
            "5:event:orders,6:event:fetch,9:event:orders&at=7"
        ),
    ),
]  # fmt: skip
