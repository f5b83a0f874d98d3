// Tiles with a figure each, and how it was in the last minute.

const TILES = [
  ["generated", "Tokens/s", (s) => s.generated_per_s, number],
  ["prompt", "Prompt tokens/s", (s) => s.prompt_per_s, number],
  ["ttft50", "TTFT p50", (s) => s.ttft.p50, measured],
  ["ttft90", "TTFT p90", (s) => s.ttft.p90, measured],
  ["ttft99", "TTFT p99", (s) => s.ttft.p99, measured],
  ["itl50", "ITL p50", (s) => s.itl.p50, measured],
  ["itl90", "ITL p90", (s) => s.itl.p90, measured],
  ["itl99", "ITL p99", (s) => s.itl.p99, measured],
  ["running", "Running", (s) => total(s.ranks, "running"), number],
  ["waiting", "Waiting", (s) => total(s.ranks, "waiting") + s.num_held, number],
  ["kv", "KV cache, fullest", (s) => Math.max(0, ...s.ranks.map((rank) => rank.kv_usage)), percent],
  ["hits", "Cache hits, mean", (s) => total(s.ranks, "hit_rate") / Math.max(1, s.ranks.length), percent],
];
const POINTS = 120; // of half a second each

function total(items, name) {
  return items.reduce((sum, item) => sum + item[name], 0);
}

const history = {
  points: Object.fromEntries(TILES.map(([key]) => [key, []])),
  at: 0,
  take(snapshot) {
    if (snapshot.at_s - this.at < 0.5 && snapshot.at_s > this.at) return;
    this.at = snapshot.at_s;
    for (const [key, , value] of TILES) {
      this.points[key].push(value(snapshot));
      if (this.points[key].length > POINTS) this.points[key].shift();
    }
  },
};

const tiles = new Map();
for (const [key, title] of TILES) {
  const value = el("span", { class: "value", id: `tile-${key}` }, "-");
  const line = svg("polyline");
  const picture = svg("svg", { viewBox: `0 0 ${POINTS} 28`, preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(line);
  byId("tiles").append(el("div", { class: "tile" }, el("dt", {}, title), el("dd", {}, value, picture)));
  tiles.set(key, { value, line });
}

function showTiles(snapshot) {
  for (const [key, , value, format] of TILES) {
    const tile = tiles.get(key);
    say(tile.value, format(value(snapshot)));
    const points = history.points[key];
    const most = Math.max(...points, 1e-9);
    const first = POINTS - points.length;
    set(tile.line, { points: points.map((one, place) => `${first + place},${(26 - (24 * one) / most).toFixed(1)}`).join(" ") });
  }
}
