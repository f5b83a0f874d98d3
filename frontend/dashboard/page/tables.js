// Rows that are kept, and the tables of processes and ranks.

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
    const texts = [one.name, one.node, one.state, one.phase, String(one.restarts), measured(one.uptime_s), megabytes(one.rss_bytes), String(one.pid || "-")];
    texts.forEach((text, place) => say(cells[place], text));
    set(cells[2], { class: stateClass(one.state) });
  });
}

function meterRow() {
  const row = plainRow(["rank", "running#", "waiting#", "kv", "groups", "hits#", "tokens#", "prompt#", "busy", "preempted#", "step", "experts", "drafts#"]);
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
      0: `${rank.rank} ${rank.role}`.trim(), 1: String(rank.running), 2: String(rank.waiting), 4: counts(rank.kv_groups) || "-",
      5: percent(rank.hit_rate), 6: number(rank.generated_per_s), 7: number(rank.prompt_per_s), 9: String(rank.preemptions),
      12: rank.accepted === null ? "-" : `${percent(rank.accepted)}, ${rank.accepted_len.toFixed(1)} tokens`,
    };
    for (const [place, text] of Object.entries(texts)) say(cells[place], text);
    set(cells[0], { title: rank.role && `${rank.hand_offs} handed off` });
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

function tierRow() {
  const row = plainRow(["tier", "filled", "hits#", "stored#", "evicted#", "state"]);
  row.meter = el("meter", { min: "0", max: "1" });
  row.text = el("span");
  row.cells[1].append(row.meter, " ", row.text);
  return row;
}

function showStores(snapshot) {
  byId("stores").hidden = !snapshot.stores.length;
  const [hits, ceiling] = ["hit_rate", "ceiling"].map((name) => snapshot.stores.map((store) => percent(store[name])).join(", "));
  say(byId("store-hits"), `It had ${hits} of the blocks that it was asked for; a store without any bound would have had ${ceiling}.`);
  const tiers = snapshot.stores.flatMap((store) => store.tiers.map((tier) => ({ ...tier, key: `${store.process} ${tier.name}` })));
  rows(byId("tier-rows"), tiers, (tier) => tier.key, tierRow, ({ cells, meter, text }, tier) => {
    const texts = { 0: tier.name, 2: number(tier.hits), 3: number(tier.stored), 4: number(tier.evicted), 5: tier.paused ? "paused" : "" };
    for (const [place, one] of Object.entries(texts)) say(cells[place], one);
    set(meter, { value: tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0, "aria-label": `Filled share of ${tier.name}` });
    say(text, megabytes(tier.used_bytes) + (tier.capacity_bytes ? ` of ${megabytes(tier.capacity_bytes)}` : ""));
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
