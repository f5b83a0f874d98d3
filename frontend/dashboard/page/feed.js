// The stream of snapshots, and what it is drawn by.

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
    showStores(snapshot);
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
