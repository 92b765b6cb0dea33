// The nodes, and the map of shards: who owns what; a shard that has moved is highlighted.

import { h, fill, name, pill, setText } from "./dom.js";
import { count, duration, plural, relative } from "./format.js";

const COLOURS = 8;
const HIGHLIGHT = 10000; // milliseconds that a moved shard is outlined

export class ShardMap {
  constructor(actions = null) {
    this.actions = actions; // makes the last cell of a node's row
    this.owners = null;
    this.map = h("div", { class: "shards", role: "img", "aria-label": "Owners of the shards" });
    this.body = h("tbody");
    const heads = ["Node", "State", "Shards", "In memory", "Running", "Up", "Version", ...(actions ? [""] : [])];
    this.element = h("div", { class: "stack" }, this.map, h("div", { class: "table-wrap" }, h("table", { class: "cards" },
      h("thead", {}, h("tr", {}, heads.map((text, index) => h("th", { scope: "col", class: index > 1 && index < 7 ? "right" : null }, text || h("span", { class: "visually-hidden" }, "Actions"))))), this.body)));
  }

  update({ nodes, owners }, stats) {
    const names = [...new Set([...nodes.map((node) => node.name), ...owners.filter(Boolean)])].sort();
    const colour = (owner) => `node-${names.indexOf(owner) % COLOURS}`;
    while (this.map.children.length > owners.length) this.map.lastChild.remove();
    owners.forEach((owner, shard) => {
      const cell = this.map.children[shard] ?? this.map.appendChild(h("span", {}, shard));
      const moved = this.owners && this.owners[shard] !== owner;
      if (cell.dataset.owner === (owner ?? "") && !moved) return;
      cell.dataset.owner = owner ?? "";
      cell.className = owner ? colour(owner) : "free";
      cell.title = `shard ${shard}: ${owner ?? "no owner"}`;
      if (!moved) return;
      requestAnimationFrame(() => cell.classList.add("moved"));
      setTimeout(() => cell.classList.remove("moved"), HIGHLIGHT);
    });
    this.owners = owners;
    const free = owners.filter((owner) => !owner).length;
    this.map.setAttribute("aria-label", `${plural(owners.length, "shard")} of ${plural(nodes.length, "node")}${free ? `, ${free} without an owner` : ""}`);
    const figures = Object.fromEntries((stats?.by_node ?? []).map((row) => [row.name, row]));
    fill(this.body, nodes.map((node) => {
      const found = figures[node.name];
      return h("tr", {},
        h("td", { class: "node" }, h("span", { class: `swatch ${colour(node.name)}` }), name(node.name, 60), node.this && h("span", { class: "faint" }, " · this one"),
          found?.error && h("span", { class: "sub" }, found.error)),
        h("td", { class: "end" }, pill(node.state)),
        h("td", { class: "right", "data-label": "shards" }, count(node.shards)),
        h("td", { class: "right", "data-label": "in memory" }, count(found?.held)),
        h("td", { class: "right", "data-label": "running" }, count(found?.running)),
        h("td", { class: "right", "data-label": "up" }, found?.uptime ? duration(found.uptime) : relative(node.started_at).replace(" ago", "") || "–"),
        h("td", { class: "right", "data-label": "version" }, node.version ?? "–"),
        this.actions && h("td", { class: "right" }, this.actions(node)));
    }));
  }
}
