"""A headless Chromium (QtWebEngine) that a test tells what to do: a JSON object a line in, an answer a line out.

It runs with the Python of .venv-browser, which the Makefile makes; nothing of MeshLM is imported here.

    {"open": URL}  {"run": JAVASCRIPT}  {"size": [WIDTH, HEIGHT]}  {"shot": FILE}  {"console": true}

With the argument `dark` the system that it says it has is a dark one.
"""

import json
import os
import sys
import threading

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
SCHEME = 0 if "dark" in sys.argv[1:] else 1  # Blink's numbers
FLAGS = f"--no-sandbox --disable-gpu --lang=en-GB --blink-settings=preferredColorScheme={SCHEME}"
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", FLAGS)
os.environ.setdefault("QT_LOGGING_RULES", "*.warning=false")

from PySide6.QtCore import QObject, QUrl, Signal  # noqa: E402
from PySide6.QtWebEngineCore import QWebEnginePage  # noqa: E402
from PySide6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PySide6.QtWidgets import QApplication  # noqa: E402


class Page(QWebEnginePage):
    """Keeps what the page says on its console."""

    def __init__(self, parent):
        super().__init__(parent)
        self.said = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.said.append(f"{level.name}: {message} ({source}:{line})")

    def javaScriptAlert(self, origin, message):
        self.said.append(f"alert: {message}")


class Driver(QObject):
    """Does what each line says, in the thread of the browser."""

    line = Signal(str)

    def __init__(self, app):
        super().__init__()
        self._app = app
        self._view = QWebEngineView()
        self._page = Page(self._view)
        self._view.setPage(self._page)
        self._view.resize(1280, 900)
        self._view.show()
        self._page.loadFinished.connect(self._loaded)
        self._opening = False
        self.line.connect(self._do)

    def read(self):
        for line in sys.stdin:
            self.line.emit(line)
        self.line.emit("{}")

    def _answer(self, value):
        print(json.dumps(value, default=str), flush=True)

    def _loaded(self, ok):
        if self._opening:
            self._opening = False
            self._answer(ok)

    def _do(self, line):
        match json.loads(line):
            case {"open": url}:
                self._opening = True
                self._page.load(QUrl(url))
            case {"run": script}:
                self._page.runJavaScript(script, 0, self._answer)
            case {"size": [width, height]}:
                self._view.resize(width, height)
                self._app.processEvents()
                self._answer(True)
            case {"shot": path}:
                self._answer(self._view.grab().save(path))
            case {"console": _}:
                said, self._page.said = self._page.said, []
                self._answer(said)
            case _:
                self._view.setPage(None)
                self._page.deleteLater()
                self._app.quit()


app = QApplication(["driver"])
driver = Driver(app)
threading.Thread(target=driver.read, daemon=True).start()
app.exec()
