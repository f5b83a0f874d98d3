// The last of the files: all others are read. What the server says is drawn behind the first paint, which does not wait for it.

requestAnimationFrame(() => setTimeout(() => feed.run()));
