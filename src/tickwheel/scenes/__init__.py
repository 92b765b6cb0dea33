"""Scenes of the lab: a structure, a script of actions, and the state at any time.

A scene is a value: the same script and the same time give the same state, so that a link can
reproduce it. `show` builds the structure, plays the script up to a time, and describes what is
there. The structures are the package's own; nothing here moves an entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tickwheel.scenes.idle import IdleScene
from tickwheel.scenes.purgatory import PurgatoryScene
from tickwheel.scenes.script import parse_script
from tickwheel.scenes.wheels import WheelScene

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel.scenes.script import Action, Kinds


class Scene(Protocol):
    """A structure that plays a script; `verbs` has the arguments of its actions."""

    verbs: ClassVar[dict[str, Kinds]]

    def __init__(self, kind: str, script: Sequence[Action], options: dict[str, str]) -> None: ...

    def show(self) -> dict[str, Any]: ...


SCENES: dict[str, type[Scene]] = {
    "wheel": WheelScene,
    "simple": WheelScene,
    "rounds": WheelScene,
    "idle": IdleScene,
    "purgatory": PurgatoryScene,
}


def show(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of a scene at the time `at`; `options` are those of its link.

    - `kind`: one of `SCENES`; `do`: its script; the other options depend on the kind.
    - An unknown option or an invalid value raises ValueError.
    """
    given = dict(options)
    kind = given.pop("kind", "wheel")
    scene = SCENES.get(kind)
    if scene is None:
        raise ValueError(f"kind must be one of {', '.join(SCENES)}, got {kind!r:.100}")
    script = parse_script(given.pop("do", ""), scene.verbs)
    return scene(kind, script, given).show()
