"""Covers scenes: each worked example of the documents, played as a scene."""

import json

import pytest

from scenes.worked import ROUNDS, WAKEUPS, WORKED
from tickwheel.scenes import SCENES, show
from tickwheel.scenes.presets import PRESETS
from tickwheel.scenes.purgatory import PurgatoryScene
from tickwheel.scenes.script import MAX_ACTIONS, MAX_TURNS


def scene(text, at=0):
    return show({**dict(part.split("=", 1) for part in text.split("&")), "at": str(at)})


def places(text, at, entry="A"):
    """Return the path of an entry as [(time, level, slot)]."""
    found = {one["name"]: one for one in scene(text, at)["entries"]}
    return [(step["at"], step["level"], step["slot"]) for step in found[entry]["path"]]


@pytest.mark.parametrize(("text", "path", "due"), WORKED)
@pytest.mark.parametrize("pointers", ["own", "pushed"])
def test_an_entry_goes_where_the_documents_put_it_and_fires_in_time(text, path, due, pointers):
    if text.startswith("kind=wheel"):
        text += f"&pointers={pointers}"
    for number, (at, level, slot) in enumerate(path, 1):
        assert places(text, at) == path[:number]
        found = scene(text, at)["entries"][0]
        assert (found["level"], found["slot"], found["left"]) == (level, slot, due - at)
    assert scene(text, due - 1)["entries"][0]["state"] == "pending"
    last = scene(text, due)["events"][-1]
    assert (last["what"], last["at"]) == ("fired", due)
    assert places(text, due) == path


def test_levels_are_made_when_an_entry_needs_them():
    for delay, intervals in ((19, [20]), (350, [20, 400]), (450, [20, 400, 8000])):
        levels = scene(f"kind=wheel&size=20&do=0:add:{delay}")["levels"]
        assert [level["tick"] * level["size"] for level in levels] == intervals
        assert sum(level["size"] for level in levels) == 20 * len(intervals)


def test_what_still_does_not_fit_stays_in_the_buffer():
    text = "kind=wheel&sizes=8.8.8&overflow=memory&do=0:add:600"
    for at, left, level in ((64, 536, 0), (127, 473, 0), (128, 472, 3)):
        entry = scene(text, at)["entries"][0]
        assert (entry["left"], entry["level"]) == (left, level)


def test_an_entry_is_pending_until_its_time_and_then_fired():
    text = "kind=wheel&size=20&do=0:add:450"
    before, after = scene(text, 449)["entries"][0], scene(text, 450)["entries"][0]
    assert (before["state"], before["left"], before["slot"]) == ("pending", 1, 10)
    assert (after["state"], after["left"], after["slot"]) == ("fired", 0, None)


def test_an_entry_that_does_not_fit_is_refused_with_the_wheels_own_words():
    entry = scene("kind=simple&size=20&do=2:add:22", 2)["entries"][0]
    assert entry["state"] == "refused"
    assert "24" in entry["error"]


@pytest.mark.parametrize(("delay", "rounds"), ROUNDS)
def test_rounds_count_the_whole_turns_that_are_left(delay, rounds):
    entry = scene(f"kind=rounds&size=8&do=0:add:{delay}")["entries"][0]
    assert (entry["rounds"], entry["slot"]) == (rounds, delay % 8)


@pytest.mark.parametrize(("delay", "wakeups"), WAKEUPS)
def test_the_drivers_wake_as_often_as_the_documents_say(delay, wakeups):
    drivers = scene(f"kind=wheel&size=20&do=0:add:{delay}", delay)["drivers"]
    assert drivers["precise"] == {"wakeups": wakeups, "empty": 0}
    assert drivers["ticking"] == {"wakeups": delay, "empty": delay - wakeups}


@pytest.mark.parametrize("kind", ["wheel", "rounds", "simple"])
def test_a_wake_up_at_time_0_counts_for_no_tick(kind):
    for at, empty in ((0, 0), (1, 1), (5, 4)):
        drivers = scene(f"kind={kind}&size=20&do=0:add:0,0:add:5", at)["drivers"]
        assert drivers["ticking"] == {"wakeups": at, "empty": empty}
        assert drivers["precise"] == {"wakeups": 1 if at < 5 else 2, "empty": 0}


def test_cancelled_and_moved_entries_leave_their_slots():
    state = scene("kind=wheel&size=20&do=0:add:350,0:add:350,10:cancel:1,10:move:2:5", 10)
    first, second = state["entries"]
    assert first["state"] == "cancelled"
    assert (second["level"], second["slot"], second["expiry"]) == (1, 15, 15)
    assert state["pending"] == 1


def test_the_moments_are_the_times_at_which_something_happens_even_later_ones():
    assert scene("kind=wheel&size=20&do=0:add:350,0:add:450", 0)["moments"] == [
        0, 340, 350, 400, 440, 450,
    ]  # fmt: skip


def test_the_spans_of_slots_are_those_that_their_entries_wait_for():
    level = scene("kind=wheel&size=20&do=2:add:399", 2)["levels"][1]
    assert level["starts"][:3] == [400, 20, 40]


def test_a_silent_user_is_offline_after_exactly_the_timeout():
    text = "kind=idle&timeout=30&do=0:packet:ann,20:packet:ann"
    assert scene(text, 49)["entries"][0]["state"] == "online"
    user = scene(text, 50)["entries"][0]
    assert (user["state"], user["offline_at"]) == ("offline", 50)


def test_a_packet_stamps_the_user_and_does_not_move_it():
    text = "kind=idle&timeout=30&do=0:packet:ann,20:packet:ann"
    before, after = scene(text, 19)["entries"][0], scene(text, 20)["entries"][0]
    assert before["slot"] == after["slot"]
    assert (before["seen"], after["seen"]) == (0, 20)


def test_an_operation_completes_by_its_events_or_by_its_deadline():
    text = "kind=purgatory&do=0:wait:p:2:30,1:event:p,2:wait:q:3:5,4:event:p"
    first, second = scene(text, 6)["entries"]
    assert (first["state"], first["ended_at"]) == ("completed", 4)
    assert second["state"] == "watched"
    assert scene(text, 6)["watched"] == scene(text, 6)["delayed"] == 1
    assert scene(text, 7)["entries"][1]["state"] == "expired"
    assert scene(text, 7)["delayed"] == 0


@pytest.mark.parametrize("at", [0, 5, 9])
def test_an_operation_without_time_expires_at_once(at):
    state = scene("kind=purgatory&do=5:wait:a:1:0,7:event:a", at)
    assert [one["state"] for one in state["entries"]] == (["expired"] if at >= 5 else [])
    assert state["moments"] == [5, 7]


def test_a_structure_that_never_moves_on_uses_up_its_turns(monkeypatch):
    monkeypatch.setattr(PurgatoryScene, "_move_to", lambda scene, now: None)
    with pytest.raises(ValueError, match=str(MAX_TURNS)):
        scene("kind=purgatory&do=0:wait:a:1:8")


@pytest.mark.parametrize(
    "text",
    [
        "kind=wheel&sizes=2.2.2.2.2.2&overflow=memory&pointers=pushed",
        "kind=wheel&size=2",
        "kind=wheel&size=64",
        "kind=rounds&size=64&tick=1000000",
        "kind=idle&timeout=600",
        "kind=purgatory",
    ],
)
def test_the_state_of_the_longest_script_is_bounded(text):
    form = {"idle": "packet:u{0}", "purgatory": "wait:k{0}:9:9000000"}
    verb = form.get(text[5:].partition("&")[0], "add:{1}")
    script = [f"{30 * n}:{verb.format(n, 97 * n)}" for n in range(MAX_ACTIONS)]
    state = scene(f"{text}&do={','.join(script)}", 1_700)
    assert len(state["entries"]) > MAX_ACTIONS / 2
    assert len(json.dumps(state)) < 256 << 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "spiral"}, "kind must be one of wheel"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"do": "now"}, "TIME:add:NUMBER"),
        ({"do": "0:add"}, "TIME:add:NUMBER"),
        ({"do": "0:add:-1"}, "whole number"),
        ({"do": "0:add:" + "9" * 5_000}, "whole number"),
        ({"do": "0:cancel:3"}, "entry 3 of 0"),
        ({"do": ",".join(["0:add:1"] * (MAX_ACTIONS + 1))}, str(MAX_ACTIONS)),
        ({"kind": "rounds", "size": "2", "do": "0:add:9000000"}, str(MAX_TURNS)),
        ({"sizes": "8.8.8.8.8.8.8"}, "6 levels"),
        ({"overflow": "memory"}, "needs sizes"),
        ({"kind": "idle", "do": "0:packet:<b>"}, "letters or digits"),
        ({"kind": "idle", "at": "99999"}, "3600"),
    ],
)
def test_an_invalid_scene_is_refused_with_what_would_be_right(options, words):
    with pytest.raises(ValueError, match=words):
        show(options)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
def test_a_preset_can_be_played_at_each_of_its_moments(preset):
    moments = show(preset.scene)["moments"]
    assert moments
    for moment in moments:
        assert show({**preset.scene, "at": str(moment)})["now"] == moment


def test_every_kind_of_scene_has_a_preset():
    assert {preset.scene["kind"] for preset in PRESETS} == set(SCENES)
