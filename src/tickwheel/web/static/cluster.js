// The cluster: nodes and the shards that they own; an admin drains a node.

import { may, post, remove, session } from "./api.js";
import { ask, card, fill, h, toast } from "./dom.js";
import { live, watch } from "./live.js";
import { ShardMap } from "./nodes.js";

export function cluster(page, { signal }) {
  const map = new ShardMap(may("admin") && !session.known.confined ? (node) => drainButton(node) : null);
  fill(page, h("div", { class: "page-head" }, h("h1", {}, "Cluster")), card("Nodes and shards", "a shard that has moved is outlined", map.element));
  watch(signal, "cluster", (found) => map.update(found, live.last.figures?.stats));
}

function drainButton(node) {
  const drains = ["draining", "drained"].includes(node.state);
  if (!drains && node.state !== "active") return null;
  const path = `v1/nodes/${encodeURIComponent(node.name)}/drain`;
  return h("button", { type: "button", "aria-label": `${drains ? "Undrain" : "Drain"} ${node.name}`, onclick: async () => {
    const text = drains ? "It gets shards again." : "Its shards move to the other nodes. It finishes its calls and keeps running.";
    const done = await ask({ title: `${drains ? "Undrain" : "Drain"} ${node.name}?`, action: drains ? "Undrain" : "Drain", body: h("p", { class: "soft" }, text), check: () => (drains ? remove(path) : post(path)).then(() => true) });
    if (done) toast(drains ? "Its shards come back" : "Its shards move away");
  } }, drains ? "Undrain" : "Drain");
}
