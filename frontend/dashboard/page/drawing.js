// The processes and the links between them.

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
