"""Chromium without a window, driven over the pipe of its debugging protocol: https://chromedevtools.github.io/devtools-protocol/."""
import json
import os
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 60


class Browser:
    """One page of a Chromium of its own. Its profile is `folder`."""

    def __init__(self, folder):
        self.number, self.session, self.buffer = 0, None, b""
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        # Chromium reads its file descriptor 3 and writes to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "_", PROGRAM, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands), os.close(answers)
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.call("Page.enable")

    def close(self):
        os.close(self.commands), os.close(self.answers)
        self.process.kill()
        self.process.wait()

    def call(self, method, **params):
        self.number += 1
        os.write(self.commands, json.dumps({"id": self.number, "method": method, "params": params} |
                                           ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                part = os.read(self.answers, 1 << 16)
                assert part, "Chromium has ended"
                self.buffer += part
            line, self.buffer = self.buffer.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url):
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.until(f"document.readyState == 'complete' && location.href.startsWith({json.dumps(url)})")

    def until(self, condition):
        """Waits for it to hold on the page."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.evaluate(condition):
                return
            self.evaluate("new Promise(done => setTimeout(done, 50))")
        raise AssertionError(f"{condition}: not within {PATIENCE_S} s; the page: {self.evaluate('document.body.innerText')[:2000]}")
