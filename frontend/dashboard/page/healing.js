// A kill, and how it heals.

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
