// Reading answers of the server: errors, and streams of events.

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
