"""Buffs in a game: they expire, are refreshed, stack, and tick.

A game has its own time, which can be paused or run at any speed: here it is a `ManualClock`, moved
once per frame. So a minute of the game takes a moment, and every run prints the same.

    python examples/game_buffs.py
"""

import tickwheel

FRAME = 1 / 60


class Hero:
    """A character with buffs, each of which ends by itself."""

    def __init__(self, name, timer):
        self.name = name
        self.timer = timer
        self.health = 50
        self.buffs = {}  # name -> handle of its end
        self.stacks = {}  # name -> count

    def say(self, text):
        print(f"{self.timer.time():6.2f} s  {self.name} {text}")

    def add(self, buff, seconds):
        """Add a buff; an active one is renewed from now."""
        handle = self.buffs.get(buff)
        if handle is not None and handle.reschedule(seconds):
            self.say(f"refreshes {buff}: {seconds} s more")
            return
        self.buffs[buff] = self.timer.call_later(seconds, self.end, buff)
        self.say(f"gains {buff} for {seconds} s")

    def end(self, buff):
        del self.buffs[buff]
        self.say(f"loses {buff}")

    def stack(self, buff, seconds, most=3):
        """Add one more of a buff; each ends after its own time."""
        if self.stacks.get(buff, 0) == most:
            self.say(f"has {most} {buff} already")
            return
        self.stacks[buff] = self.stacks.get(buff, 0) + 1
        self.timer.call_later(seconds, self.unstack, buff)
        self.say(f"has {self.stacks[buff]} {buff}")

    def unstack(self, buff):
        self.stacks[buff] -= 1
        self.say(f"is down to {self.stacks[buff]} {buff}")

    def regenerate(self, health, period, seconds):
        """Gain health periodically, for some time."""
        healing = self.timer.call_every(period, self.heal, health)
        self.timer.call_later(seconds, healing.cancel)
        self.say(f"drinks: {health} health every {period} s for {seconds} s")

    def heal(self, health):
        self.health += health
        self.say(f"has {self.health} health")

    def dispel(self):
        """Remove every buff early."""
        gone = [buff for buff, handle in self.buffs.items() if handle.cancel()]
        self.buffs.clear()
        self.say(f"is dispelled of {', '.join(gone)}")


clock = tickwheel.ManualClock()
timer = tickwheel.Timer(tick=0.001, clock=clock)
hero = Hero("Mira", timer)

script = tickwheel.Timer(tick=0.001, clock=clock)  # the player's actions
script.call_at(1, hero.add, "shield", 10)
script.call_at(2, hero.regenerate, 5, 2, 7)
for moment in (3.0, 3.5, 4.0, 4.5):
    script.call_at(moment, hero.stack, "rage", 4)
script.call_at(9, hero.add, "shield", 10)  # in time: it would have ended at 11
script.call_at(20, hero.add, "haste", 30)
script.call_at(21, hero.add, "stealth", 30)
script.call_at(25, hero.dispel)

frames = 0
while clock.time() < 60:
    clock.advance(FRAME)
    frames += 1
stats = timer.stats()
print(f"{frames} frames, {stats['fired']} firings, {stats['cancelled']} cancelled")
