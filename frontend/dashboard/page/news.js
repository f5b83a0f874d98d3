// Lines of what happened.

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
