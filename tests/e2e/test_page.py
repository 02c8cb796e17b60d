"""The page of `dms-serve` in a browser, with the model's real evictions."""

from __future__ import annotations

import pytest

from tests.support import browser, served_model
from tests.support.served_model import wait_for

pytestmark = pytest.mark.timeout(300)
FADED = "[...document.querySelectorAll('#text span')].map(span => span.className.includes('gone'))"


def test_tokens_that_the_server_reports_as_evicted_fade(tmp_path):
    model = served_model.write_model(tmp_path)
    with served_model.serving(model) as server, browser.opened() as page:
        page.open(f"{server.url}/")
        wait_for(lambda: page.text("#model") == served_model.NAME)
        page.type("#prompt", "the river and the stone")
        page.evaluate("document.getElementById('tokens').value = 60")
        page.click("#ignore")
        page.click("#run")
        wait_for(lambda: page.text("#status") == "done")

        body = {"prompt": "the river and the stone", "temperature": 0, "max_tokens": 60}
        whole = server.ask("/v1/completions", {**body, "ignore_eos": True})[2]
        text = whole["choices"][0]["text"]
        assert page.text("#text").replace("<|endoftext|>", "") == body["prompt"] + text
        assert page.text("#factor") == f"{whole['usage']['kv']['cr_factor']:.2f}"
        assert page.evaluate("document.querySelectorAll('#layer option').length") == 1 + 2

        for layer, head in ((0, 0), (1, 1)):
            page.evaluate(f"select({layer}, {head})".replace("select", SELECT))
            gone = page.evaluate(FADED)
            live = page.evaluate(f"view.positions[{layer}][{head}]")
            seen = int(page.text("#seen"))
            assert [i for i in range(seen) if not gone[i]] == live
            assert page.text("#held") == str(len(live))
            assert 8 <= len(live) < seen
        assert page.console_messages() == []


SELECT = """((layer, head) => {
  for (const [id, value] of [["layer", layer], ["head", head]]) {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event("change"));
  }
})"""


def test_an_error_of_the_server_is_shown(tmp_path):
    model = served_model.write_model(tmp_path, chat=False)
    with served_model.serving(model, api_key="secret") as server, browser.opened() as page:
        page.open(f"{server.url}/")
        page.type("#prompt", "hello")
        page.click("#run")
        wait_for(lambda: "API key" in page.text("#status"))
        page.type("#key", "secret")
        page.evaluate("document.getElementById('route').value = '/v1/chat/completions'")
        page.click("#run")
        wait_for(lambda: "no chat template" in page.text("#status"))
