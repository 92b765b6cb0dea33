"""A network of its own: one namespace for each machine, joined by a bridge, without a way out.

It must run in a network namespace of its own: see `isolation`. Packets between two machines can be
dropped, in one direction or in both, all of them or at random.
"""

import subprocess
from pathlib import Path

NETWORK = "192.0.2"  # reserved for documentation: it is routed nowhere
HUB = f"{NETWORK}.1"  # the address of the harness, from which its client asks
PROXIES = f"{NETWORK}.2"  # its other address, for proxies
BRIDGE = "hub"
NAMESPACES = Path("/run/netns")


def run(*words, text=None):
    done = subprocess.run(words, input=text, capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}\n{text or ''}")
    return done.stdout


def open_network():
    """Create the bridge; `Machine` needs it."""
    NAMESPACES.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "tmpfs", str(NAMESPACES))
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    for address in (HUB, PROXIES):
        run("ip", "address", "add", f"{address}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


class Machine:
    """A network namespace with one address."""

    def __init__(self, name, number):
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.namespace = str(NAMESPACES / name)
        self._rules = {}
        run("ip", "netns", "add", name)
        outside = f"to-{name}"
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", outside, "master", BRIDGE, "up")
        run("ip", "-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            run("ip", "-n", name, "link", "set", link, "up")

    def drop(self, addresses, *, incoming=True, outgoing=True, percent=100):
        """Drop packets to and from these addresses until `heal`."""
        self._rules = {"input": [], "output": []}
        chance = f"numgen random mod 100 < {percent} " if percent < 100 else ""
        for address in addresses:
            if incoming:
                self._rules["input"].append(f"ip saddr {address} {chance}drop")
            if outgoing:
                self._rules["output"].append(f"ip daddr {address} {chance}drop")
        self._apply()

    def heal(self):
        self._rules = {}
        self._apply()

    def _apply(self):
        lines = ["flush ruleset"]
        if self._rules:
            lines.append("table ip faults {")
            for hook, rules in self._rules.items():
                lines += [f"chain {hook} {{", f"type filter hook {hook} priority 0"]
                lines += [*rules, "}"]
            lines.append("}")
        run("nsenter", f"--net={self.namespace}", "nft", "-f", "-", text="\n".join(lines) + "\n")
