// The theme, and the API key of this tab.

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
