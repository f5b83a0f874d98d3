// The table of requests.

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
  set(row.cells[0], { title: request.frontend ?? feed.latest?.frontend ?? "" });
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
