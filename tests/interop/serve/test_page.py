"""The page in Chromium: it shows what runs do without being loaded again, names are text whatever is in them, and a key lets in."""
import json
import subprocess

import pytest

from serve.browser import PROGRAM, Browser
from serve.serving import HEDDLE, NAME, Server
from serve.test_hostile import Caller
from serve.test_crowds import DATUM

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")

HOSTILE = """<img src=x onerror="document.title='taken'"><script>document.title='taken'</script></td></table><b id=taken>\u202e'"&lt;"""
SHOWN = "(document.querySelector('main')?.textContent ?? '')"


@pytest.fixture
def page(tmp_path):
    browser = Browser(tmp_path / "chromium")
    yield browser
    browser.close()


def train(caller, run, first_seq, steps):
    for seq in range(first_seq, first_seq + 2 * steps, 2):
        caller.outcome("forward_backward", {"model_id": run, "seq_id": seq, "forward_backward_input": {
            "data": [DATUM], "loss_fn": "cross_entropy"}})
        caller.outcome("optim_step", {"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-3}})


def points(run):
    """Of the curve in the run's row, in the page's language."""
    return (f"[...document.querySelectorAll('tr')].find(row => row.textContent.includes({json.dumps(run)}))"
            "?.querySelector('polyline')?.getAttribute('points').trim().split(' ').length")


def test_curves_grow_and_names_are_text(model, tmp_path, page):
    running = Server(model, tmp_path / "data").start()
    caller = Caller(running)
    session = caller.post("create_session", {"tags": [], "sdk_version": "0.38.0", "display_name": HOSTILE})[2]["session_id"]
    run = caller.outcome("create_model", {"session_id": session, "model_seq_id": 0, "base_model": NAME,
                                          "lora_config": {"rank": 4, "seed": 1}})["model_id"]
    train(caller, run, 1, 3)
    page.open(running.url + "/admin")
    page.until(f"{points(run)} == 3")
    page.evaluate("window.was_here = true")
    train(caller, run, 7, 2)
    page.until(f"{points(run)} == 5")
    saved = caller.outcome("save_weights_for_sampler", {"model_id": run, "seq_id": 11, "path": "shown"})["path"]
    page.until(f"{SHOWN}.includes({json.dumps(saved)})")
    assert page.evaluate("window.was_here"), "the page was loaded again"
    assert HOSTILE in page.evaluate(SHOWN)
    assert page.evaluate("[document.title, document.querySelector('#taken'), document.querySelectorAll('main img, main script').length]") == [
        "Heddle", None, 0]
    assert running.stop() == 0


def test_a_key_lets_in(model, tmp_path, page):
    added = subprocess.run([HEDDLE, "serve", "keys", "add", "--data-dir", tmp_path / "data", "--tenant", "ann", "--scopes", "admin"],
                           check=True, capture_output=True, text=True)
    key = added.stdout.split()[-1]
    running = Server(model, tmp_path / "data").start()

    def log_in(with_key):
        page.evaluate(f"document.querySelector('input[name=key]').value = {json.dumps(with_key)}; document.querySelector('button').click()")

    page.open(running.url + "/admin")
    assert "Runs" not in page.evaluate(SHOWN)
    log_in("tml-" + "0" * 64)
    page.until(f"{SHOWN}.includes('not known')")
    log_in(key)
    page.until(f"{SHOWN}.includes('Runs')")
    assert key not in page.evaluate("document.documentElement.outerHTML") and key[:8] in page.evaluate(SHOWN)
    page.evaluate("document.querySelector('form[action=\"/admin/logout\"] button').click()")
    page.until("document.querySelector('input[name=key]') != null")
    page.open(running.url + "/admin")
    assert "Runs" not in page.evaluate(SHOWN)
    assert running.stop() == 0
