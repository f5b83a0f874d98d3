// The dashboard: what GET dashboard/events says, drawn. Whatever comes from the server becomes text nodes and attributes, never markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  set(node, attributes);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const number = (value) => (value < 1000 ? String(Math.round(value * 10) / 10) : COMPACT.format(value));
const percent = (share) => `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
const megabytes = (bytes) => (bytes ? `${Math.round(bytes / 1e6)} MB` : "-");

function duration(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

const clock = (wallSeconds) => new Date(wallSeconds * 1000).toLocaleTimeString();

// --- theme and key ---

const theme = byId("theme");
theme.value = localStorage.getItem("meshlm.theme") || "";
function applyTheme() {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
}
theme.addEventListener("change", () => {
  localStorage.setItem("meshlm.theme", theme.value);
  applyTheme();
});
applyTheme();

const KEY = "meshlm.key";
function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function askForKey(why) {
  const dialog = byId("key-dialog");
  if (why) say(byId("key-why"), why);
  if (!dialog.open) dialog.showModal();
}
byId("key-button").addEventListener("click", () => askForKey(""));
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  feed.again();
});

/** The message of an answer that is no success. */
async function failure(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `HTTP ${answer.status}`;
  }
}

/** Calls `onData` with the data of each server-sent event. */
async function readEvents(answer, onData) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) onData(line.slice(6));
  }
}

// --- the stream of snapshots ---

const RETRY_MS = [300, 1000, 2000, 5000];

const feed = {
  latest: null,
  ended: new Map(), // by number: the last thousand requests
  numEnded: 0,
  controller: null,
  retries: 0,

  again() {
    if (this.controller) this.controller.abort();
    this.retries = 0;
    this.run();
  },

  async run() {
    const controller = new AbortController();
    this.controller = controller;
    let why = "the connection ended";
    try {
      const answer = await fetch("dashboard/events", { headers: headers(), signal: controller.signal });
      if (answer.status === 401 || answer.status === 403) {
        showConnection("is-dead", "no access");
        askForKey(await failure(answer));
        return;
      }
      if (!answer.ok) throw new Error(await failure(answer));
      await this.fetchHistory(controller.signal);
      await readEvents(answer, (data) => this.take(JSON.parse(data)));
    } catch (error) {
      why = error.message;
    }
    if (controller !== this.controller || document.hidden) return;
    showConnection("is-dead", `not connected: ${why}`);
    const wait = RETRY_MS[Math.min(this.retries++, RETRY_MS.length - 1)];
    setTimeout(() => controller === this.controller && this.run(), wait);
  },

  async fetchHistory(signal) {
    const answer = await fetch("dashboard/history", { headers: headers(), signal });
    if (!answer.ok) throw new Error(await failure(answer));
    const { num_ended: total, requests, news } = await answer.json();
    this.ended.clear();
    this.numEnded = total;
    this.keep(requests);
    showNews(news);
  },

  /** The newest requests: each has its number, by which it is known. */
  keep(requests) {
    const begin = this.numEnded - requests.length;
    requests.forEach((request, place) => this.ended.set(begin + place, { ...request, number: begin + place }));
  },

  take(snapshot) {
    this.retries = 0;
    this.latest = snapshot;
    this.numEnded = snapshot.num_ended;
    this.keep(snapshot.ended);
    for (const key of this.ended.keys()) {
      if (this.ended.size <= 1000) break;
      this.ended.delete(key);
    }
    showNews(snapshot.news);
    healing(snapshot);
    history.take(snapshot);
    if (!this.drawing) this.drawing = requestAnimationFrame(() => this.draw());
  },

  draw() {
    this.drawing = 0;
    const snapshot = this.latest;
    showHead(snapshot);
    showTiles(snapshot);
    drawMesh(snapshot);
    showProcesses(snapshot);
    showRanks(snapshot);
    showRequests(false);
  },
};

document.addEventListener("visibilitychange", () => {
  if (document.hidden) feed.controller?.abort(); // nobody looks: the server need not make anything
  else feed.again();
});

function showConnection(kind, text) {
  byId("state").className = `badge ${kind}`;
  say(byId("state"), text);
}

function showHead(snapshot) {
  const broken = snapshot.reason || snapshot.missing || snapshot.blocked;
  if (snapshot.paused) showConnection("is-starting", "paused");
  else if (!snapshot.serving) showConnection("is-dead", `not serving: ${broken}`);
  else if (broken) showConnection("is-starting", `serving; ${broken}`);
  else showConnection("is-ready", "serving");
  say(byId("model"), snapshot.model);
  say(byId("where"), `${snapshot.frontend}, version ${snapshot.version}`);
}

// --- figures ---

const TILES = [
  ["generated", "Tokens/s", (s) => s.generated_per_s, number],
  ["prompt", "Prompt tokens/s", (s) => s.prompt_per_s, number],
  ["ttft50", "TTFT p50", (s) => s.ttft.p50, duration],
  ["ttft90", "TTFT p90", (s) => s.ttft.p90, duration],
  ["ttft99", "TTFT p99", (s) => s.ttft.p99, duration],
  ["itl50", "ITL p50", (s) => s.itl.p50, duration],
  ["itl90", "ITL p90", (s) => s.itl.p90, duration],
  ["itl99", "ITL p99", (s) => s.itl.p99, duration],
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

// --- a kill, and how it heals ---

const broken = new Map(); // by process: when it was first seen not to be ready
const healed = new Map(); // by process: what to say, and until when

function healing(snapshot) {
  for (const one of snapshot.processes) {
    const before = broken.get(one.name);
    const known = restarts.get(one.name);
    const died = known !== undefined && one.restarts > known;
    restarts.set(one.name, one.restarts);
    if (one.state !== "ready") {
      if (before === undefined) broken.set(one.name, snapshot.at_s);
    } else if (before !== undefined || died) {
      broken.delete(one.name);
      const text = before === undefined ? "ready again" : `ready again after ${duration(Math.max(0, snapshot.at_s - before))}`;
      healed.set(one.name, { text, until: snapshot.at_s + 10 });
      addNews(snapshot.at_s, "healed", `${one.name} is ${text}`);
    }
  }
}
const restarts = new Map();

// --- the drawing ---

const COLUMNS = ["frontend", "detokenizer", "scheduler", "worker"]; // the way of tokens, from right to left
const BOX = { width: 150, height: 40, down: 54, across: 250, top: 92 };
const boxes = new Map();
const lines = new Map();
let layout = "";

function stateClass(state) {
  return state === "ready" ? "is-ready" : state === "starting" || state === "stopping" ? "is-starting" : "is-dead";
}

/** Where each process stands: a column for each role that tokens pass, and above them those that are asked about the way. */
function places(processes) {
  const columns = COLUMNS.map((role) => processes.filter((one) => one.name.startsWith(`${role}/`)));
  const found = new Map();
  const most = Math.max(...columns.map((column) => column.length), 1);
  columns.forEach((column, place) => {
    column.forEach((one, row) => {
      const middle = ((most - column.length) * BOX.down) / 2;
      found.set(one.name, { x: 4 + place * BOX.across, y: BOX.top + middle + row * BOX.down });
    });
  });
  for (const one of processes) {
    if (one.name.startsWith("coordinator/")) found.set(one.name, { x: 4 + 1.5 * BOX.across, y: 4 });
    if (one.name.startsWith("supervisor/")) found.set(one.name, { x: 4 + 2.6 * BOX.across, y: 4 });
  }
  return { found, width: 8 + 3 * BOX.across + BOX.width, height: BOX.top + most * BOX.down + 8 };
}

/** A line between two rows: from the middle of one box's lower edge to that of the other's upper edge. */
function steep(one, other) {
  const [above, below] = one.y <= other.y ? [one, other] : [other, one];
  return { x1: above.x + BOX.width / 2, y1: above.y + BOX.height, x2: below.x + BOX.width / 2, y2: below.y };
}

function relayout(snapshot) {
  const drawing = byId("drawing");
  const { found, width, height } = places(snapshot.processes);
  drawing.replaceChildren(byId("drawing-title"));
  boxes.clear();
  lines.clear();
  set(drawing, { viewBox: `0 0 ${width} ${height}`, width, height });
  COLUMNS.forEach((role, place) => {
    const title = svg("text", { class: "column", x: 4 + place * BOX.across + BOX.width / 2, y: height - 4 });
    title.textContent = `${role}s`;
    drawing.append(title);
  });
  for (const edge of snapshot.edges) {
    const [from, to] = [found.get(edge.source), found.get(edge.target)];
    const name = [edge.source, edge.target].sort().join(" ");
    if (!from || !to || lines.has(name)) continue;
    const ends = from.x <= to.x ? [from, to] : [to, from];
    const isThin = /coordinator.*(frontend|worker)/.test(name); // membership alone
    const way = name.includes("coordinator/") ? steep(from, to) : {
      x1: ends[0].x + BOX.width, y1: ends[0].y + BOX.height / 2, x2: ends[1].x, y2: ends[1].y + BOX.height / 2,
    };
    const line = svg("line", way);
    const rate = svg("text", { class: "rate", x: (way.x1 + way.x2) / 2, y: (way.y1 + way.y2) / 2 - 4 });
    drawing.append(line, rate);
    lines.set(name, { line, rate, isThin, ahead: ends[0] === from ? edge.source : edge.target });
  }
  for (const one of snapshot.processes) {
    const place = found.get(one.name);
    if (!place) continue;
    const group = svg("g", { class: "box", transform: `translate(${place.x} ${place.y})` });
    const title = svg("title");
    const name = svg("text", { x: 8, y: 16 });
    const doing = svg("text", { class: "small", x: 8, y: 31 });
    group.append(title, svg("rect", { width: BOX.width, height: BOX.height, rx: 7 }), name, doing);
    drawing.append(group);
    boxes.set(one.name, { group, title, name, doing });
  }
}

function drawMesh(snapshot) {
  const edges = new Map();
  for (const edge of snapshot.edges) edges.set(`${edge.source} ${edge.target}`, edge.per_s);
  const now = JSON.stringify([snapshot.processes.map((one) => one.name), [...edges.keys()]]);
  if (now !== layout) {
    layout = now;
    relayout(snapshot);
  }
  const few = lines.size <= 24;
  for (const [name, { line, rate, isThin, ahead }] of lines) {
    const [one, other] = name.split(" ");
    const [there, back] = ahead === one ? [`${one} ${other}`, `${other} ${one}`] : [`${other} ${one}`, `${one} ${other}`];
    const [to, fro] = [edges.get(there) ?? 0, edges.get(back) ?? 0];
    set(line, { "stroke-width": (1 + Math.min(5, Math.log10(1 + to + fro))).toFixed(1), class: isThin ? "thin" : to + fro >= 5 ? "flows" : "" });
    say(rate, few && !isThin ? `${number(to)} → ← ${number(fro)}` : "");
  }
  for (const one of snapshot.processes) {
    const box = boxes.get(one.name);
    if (!box) continue;
    const again = healed.get(one.name);
    const fresh = again && again.until > snapshot.at_s;
    set(box.group, { class: `box ${stateClass(one.state)}${fresh ? " healed" : ""}` });
    say(box.name, one.restarts ? `${one.name} ↻${one.restarts}` : one.name);
    say(box.doing, (fresh ? again.text : one.state === "ready" ? one.phase || one.state : one.state).slice(0, 24));
    say(box.title, `${one.name}: ${one.state}, restarts: ${one.restarts}${one.node ? `, node ${one.node}` : ""}, ${megabytes(one.rss_bytes)}`);
  }
  const down = snapshot.processes.filter((one) => one.state !== "ready");
  const summary = down.length ? `not ready: ${down.map((one) => `${one.name} ${one.state}`).join(", ")}` : "all are ready";
  say(byId("drawing-title"), `${snapshot.processes.length} processes, ${summary}`);
}

// --- tables ---

/** Keeps a table's rows: `cells` gives each row's texts and nodes by its key. Rows are reused, so that focus stays. */
function rows(body, items, keyOf, make, update) {
  const kept = (body.kept ??= new Map());
  const seen = new Set();
  items.forEach((item, place) => {
    const key = keyOf(item);
    seen.add(key);
    let row = kept.get(key);
    if (!row) kept.set(key, (row = make(item)));
    update(row, item);
    if (body.children[place] !== row.node) body.insertBefore(row.node, body.children[place] ?? null);
  });
  for (const [key, row] of kept) {
    if (!seen.has(key)) {
      row.node.remove();
      kept.delete(key);
    }
  }
}

/** A row of plain cells; names that end in # are numbers. */
function plainRow(names) {
  const node = el("tr");
  const cells = names.map((name, place) => {
    const cell = el(place ? "td" : "th", name.endsWith("#") ? { class: "number" } : {});
    if (!place) cell.scope = "row";
    node.append(cell);
    return cell;
  });
  return { node, cells };
}

function showProcesses(snapshot) {
  if (!byId("process-details").open) return;
  const all = [...snapshot.processes, ...snapshot.standbys.map((one) => ({ ...one, name: `${one.name} (standby ${one.pid})` }))];
  const make = () => plainRow(["name", "node", "state", "doing", "restarts#", "uptime#", "memory#", "pid#"]);
  rows(byId("processes"), all, (one) => one.name, make, ({ cells }, one) => {
    const texts = [one.name, one.node, one.state, one.phase, String(one.restarts), duration(one.uptime_s), megabytes(one.rss_bytes), String(one.pid || "-")];
    texts.forEach((text, place) => say(cells[place], text));
    set(cells[2], { class: stateClass(one.state) });
  });
}

function meterRow() {
  const row = plainRow(["rank", "running#", "waiting#", "kv", "groups", "hits#", "tokens#", "prompt#", "busy", "preempted#", "step", "experts"]);
  row.bar = el("div", { class: "hops small", role: "img" });
  row.cells[10].append(row.bar);
  row.experts = { bars: el("span", { class: "experts", "aria-hidden": "true" }), text: el("span") };
  row.cells[11].append(row.experts.bars, row.experts.text);
  row.meters = [3, 8].map((place) => {
    const meter = el("meter", { min: "0", max: "1", high: place === 3 ? "0.9" : "1" });
    const text = el("span");
    row.cells[place].append(meter, " ", text);
    return { meter, text };
  });
  return row;
}

function showRanks(snapshot) {
  rows(byId("rank-rows"), snapshot.ranks, (rank) => rank.rank, meterRow, ({ cells, meters, bar, experts }, rank) => {
    const texts = {
      0: String(rank.rank), 1: String(rank.running), 2: String(rank.waiting), 4: counts(rank.kv_groups) || "-",
      5: percent(rank.hit_rate), 6: number(rank.generated_per_s), 7: number(rank.prompt_per_s), 9: String(rank.preemptions),
    };
    for (const [place, text] of Object.entries(texts)) say(cells[place], text);
    set(cells[2], { title: counts(rank.waiting_for) });
    set(cells[3], { title: `pages: ${counts(rank.kv_pages)}` });
    showHops(bar, rank.step);
    showExperts(experts, rank.expert_loads);
    [["KV cache", rank.kv_usage], ["Device busy", rank.busy]].forEach(([name, share], place) => {
      set(meters[place].meter, { value: share, "aria-label": `${name} of rank ${rank.rank}` });
      say(meters[place].text, percent(share));
    });
  });
}

const counts = (by) => Object.entries(by).map(([name, count]) => `${name} ${count}`).join(", ");

/** Tokens of each rank's experts as bars, and the mean over the most: 100 % is even. */
function showExperts({ bars, text }, loads) {
  const most = Math.max(...loads, 1);
  while (bars.children.length > loads.length) bars.lastChild.remove();
  while (bars.children.length < loads.length) bars.append(el("span"));
  loads.forEach((load, place) => (bars.children[place].style.height = `${(100 * load) / most}%`));
  const mean = loads.reduce((sum, load) => sum + load, 0) / Math.max(1, loads.length);
  say(text, loads.length ? `balance ${percent(mean / most)}` : "-");
}

/** A bar of parts as long as the hops took; gives what it says, and "" where it says that already. */
function showHops(bar, by) {
  const hops = Object.entries(by);
  const sum = hops.reduce((all, [, seconds]) => all + seconds, 0);
  const text = hops.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
  if (bar.said === text) return "";
  bar.said = text;
  set(bar, { "aria-label": text || "nothing", title: text });
  while (bar.children.length > hops.length) bar.lastChild.remove();
  while (bar.children.length < hops.length) bar.append(el("span"));
  hops.forEach(([name, seconds], place) => {
    const part = bar.children[place];
    part.className = hopClass(name);
    part.style.width = `${(100 * seconds) / Math.max(sum, 1e-9)}%`;
  });
  return text;
}

// --- requests ---

const HOPS = ["encode", "route", "queue", "prefill", "links", "return", "decode", "write"];
const STEP_HOPS = ["schedule", "send", "launch", "device", "return"];
for (const name of [...HOPS, "first token"]) {
  byId("hop-legend").append(el("li", { class: hopClass(name) }, name === "first token" ? "until the first token" : name));
}

function hopClass(name) {
  return HOPS.includes(name) || STEP_HOPS.includes(name) ? `hop-${name}` : "hop-wait";
}

const SHOWN = 100;
let shownAt = 0;
const open = new Set(); // requests whose hops are told one by one

function requestRow(request) {
  const key = request.number ?? request.id;
  const row = plainRow(["request", "state", "time#", "hops", "prompt#", "cached#", "output#", "rank"]);
  const name = el("button", { type: "button", class: "plain", "aria-expanded": "false" }, request.id);
  row.cells[0].className = "id";
  row.cells[0].append(name);
  row.bar = el("div", { class: "hops", role: "img" });
  row.list = el("ul", { class: "hop-list", hidden: "" });
  row.cells[3].append(row.bar, row.list);
  name.addEventListener("click", () => {
    if (!open.delete(key)) open.add(key);
    set(name, { "aria-expanded": open.has(key) });
    row.list.hidden = !open.has(key);
  });
  return row;
}

function showRequest(row, request) {
  const state = request.status === undefined
    ? `running${request.num_attempts > 1 ? `, attempt ${request.num_attempts}` : ""}`
    : `${request.status} ${request.finish_reason ?? ""}${request.num_attempts > 1 ? `, attempt ${request.num_attempts}` : ""}`;
  const texts = {
    1: state, 2: duration(request.seconds), 4: String(request.num_prompt_tokens ?? 0),
    5: String(request.num_cached_tokens ?? 0), 6: String(request.num_output_tokens ?? 0), 7: request.rank ?? "",
  };
  for (const [place, text] of Object.entries(texts)) say(row.cells[place], text);
  set(row.cells[1], { title: request.error ?? request.path ?? "" });
  if (!showHops(row.bar, request.hops)) return;
  const hops = Object.entries(request.hops);
  row.list.replaceChildren(...hops.map(([name, seconds]) => el("li", { class: hopClass(name) }, `${name} ${duration(seconds)}`)));
}

function showRequests(at_once) {
  const now = performance.now();
  if (!feed.latest || (!at_once && now - shownAt < 400)) return; // twice a second is as fast as one can read
  shownAt = now;
  const isRunning = byId("which").value === "running";
  const order = byId("order").value;
  const all = isRunning ? [...feed.latest.running] : [...feed.ended.values()];
  const weight = (request) => (order === "seconds" || order === "at_s" ? request[order] : request.hops[order] ?? -1);
  all.sort((one, other) => weight(other) - weight(one));
  rows(byId("request-rows"), all.slice(0, SHOWN), (request) => request.number ?? request.id, requestRow, showRequest);
  const of = isRunning ? `${feed.latest.num_open} open` : `the last ${all.length} of ${feed.numEnded}`;
  say(byId("request-count"), `${Math.min(all.length, SHOWN)} shown, ${of}`);
}
for (const id of ["which", "order"]) byId(id).addEventListener("change", () => showRequests(true));
byId("request-choice").addEventListener("submit", (event) => event.preventDefault());

// --- news ---

let newsUntil = 0;

function addNews(at, level, text) {
  const list = byId("news-lines");
  list.prepend(el("li", { class: level }, el("time", {}, clock(at)), text));
  while (list.children.length > 100) list.lastChild.remove();
}

function showNews(news) {
  for (const one of news) if (one.at_s > newsUntil) addNews(one.at_s, one.level, one.text);
  newsUntil = Math.max(newsUntil, ...news.map((one) => one.at_s));
}

// --- playground ---

const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05, 0.7],
  ["top_p", "Top p", 0.05, 1, 0.05, 1],
  ["top_k", "Top k (0: all)", 0, 200, 1, 0],
  ["min_p", "Min p", 0, 1, 0.01, 0],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, 0],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, 0],
  ["max_tokens", "Most tokens", 1, 4096, 1, 256],
];
for (const [name, title, least, most, step, value] of SLIDERS) {
  const slider = el("input", { type: "range", id: `slider-${name}`, min: least, max: most, step, value });
  const shown = el("output", { for: `slider-${name}` }, String(value));
  slider.addEventListener("input", () => say(shown, slider.value));
  byId("sampling").append(el("label", { for: slider.id }, `${title} `, shown, slider));
}

const talk = { messages: [], controller: null };

function turn(role) {
  const node = el("article", { class: `turn ${role}` }, el("h3", {}, role));
  byId("talk").append(node);
  return node;
}

function body() {
  const system = byId("system").value.trim();
  const tools = byId("tools").value.trim();
  const asked = {
    model: feed.latest?.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...talk.messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [name] of SLIDERS) asked[name] = Number(byId(`slider-${name}`).value);
  if (tools) asked.tools = JSON.parse(tools);
  return JSON.stringify(asked);
}

/** One answer as it comes: reasoning, text and calls, each in a place of its own. */
function answerView(node) {
  const part = {};
  const place = (name, tag) => {
    if (!part[name]) {
      part[name] = el(tag, { class: name });
      node.append(part[name]);
    }
    return part[name];
  };
  const calls = [];
  return {
    calls,
    text: "",
    take(delta) {
      const reasoning = delta.reasoning ?? delta.reasoning_content;
      if (reasoning) place("reasoning", "pre").append(reasoning);
      if (delta.content) {
        this.text += delta.content;
        place("content", "pre").append(delta.content);
      }
      for (const call of delta.tool_calls ?? []) {
        const known = (calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" }, node: null });
        known.function.name += call.function?.name ?? "";
        known.function.arguments += call.function?.arguments ?? "";
        if (!known.node) node.append((known.node = el("pre", { class: "call" })));
        say(known.node, `${known.function.name}(${known.function.arguments})`);
      }
    },
    fail(text) {
      node.append(el("p", { class: "failure" }, text));
    },
  };
}

async function converse(text) {
  turn("user").append(el("pre", {}, text));
  talk.messages.push({ role: "user", content: text });
  const view = answerView(turn("assistant"));
  const begun = performance.now();
  let first = 0;
  let usage = null;
  talk.controller = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  say(byId("said"), "waiting");
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: body(), signal: talk.controller.signal,
    });
    if (!answer.ok) throw new Error(await failure(answer));
    await readEvents(answer, (data) => {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta;
      if (!delta) return;
      if (!first && (delta.content || delta.reasoning || delta.tool_calls)) first = performance.now();
      view.take(delta);
      byId("talk").scrollTop = byId("talk").scrollHeight;
    });
    const seconds = (performance.now() - first) / 1000;
    const rate = usage && usage.completion_tokens > 1 ? `, ${number((usage.completion_tokens - 1) / seconds)} tokens/s` : "";
    say(byId("said"), first ? `first token after ${duration((first - begun) / 1000)}${usage ? `, ${usage.completion_tokens} tokens` : ""}${rate}` : "nothing was said");
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped) view.fail(error.message);
    say(byId("said"), stopped ? "stopped" : "failed");
  } finally {
    const calls = view.calls.filter(Boolean).map(({ id, type, function: called }) => ({ id, type, function: called }));
    if (view.text || calls.length) talk.messages.push({ role: "assistant", content: view.text || null, ...(calls.length ? { tool_calls: calls } : {}) });
    else talk.messages.pop();
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || byId("send").disabled) return;
  byId("message").value = "";
  converse(text);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => talk.controller?.abort());
byId("clear").addEventListener("click", () => {
  talk.controller?.abort();
  talk.messages = [];
  byId("talk").replaceChildren();
  say(byId("said"), "");
});

feed.run();
