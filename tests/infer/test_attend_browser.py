"""The page of attention weights in a real browser: what it draws is what the model computes."""

import numpy as np
import pytest
from asked_models import random_model
from attend_models import attention_weights, scripts_model, weights_in
from headless_browser import Browser, chromium
from small_saved import FAMILIES, small_saved

from bert_jax.infer.attend import attention

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium (apt-get install chromium, or BERT_JAX_CHROMIUM=PATH)"
)

ATTACK = "</script><script>alert(1)</script><!-- <script>"
TEXT = "قال الرجلون the cat 动物"
SECOND_START = 9
MOST_LINES = 3000  # of lines.js


@pytest.fixture(scope="module")
def saved():
    return scripts_model()


@pytest.fixture(scope="module")
def page(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "attention.html"
    path.write_text(attention(saved, TEXT, ATTACK).page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def weights(saved, page):
    """By numpy; the page's own tokens, as the test above has them."""
    data, _ = weights_in(page.read_text("utf-8"))
    assert data["second_start"] == SECOND_START
    return attention_weights(saved, data["tokens"], SECOND_START)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    yield browser
    assert browser.complaints() == []


def lines(browser):
    """{(from, to, head): opacity} of the drawn lines."""
    found = browser.run(
        "[...document.querySelectorAll('#curves path')].map(line => [line.dataset.from, "
        "line.dataset.to, line.dataset.head, getComputedStyle(line).strokeOpacity].map(Number))"
    )
    assert len({tuple(line[:3]) for line in found}) == len(found)
    return {(int(i), int(j), int(head)): opacity for i, j, head, opacity in found}


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def shares(browser, selector):
    return np.array([float(t.replace("%", "")) for t in texts(browser, selector)]) / 100


def assert_drawn(browser, expected):
    """`expected`: weights (H, L, L) of the heads by number; each line as opaque as its weight."""
    drawn = lines(browser)
    every = {(i, j, h): w for h, head in expected.items() for (i, j), w in np.ndenumerate(head)}
    assert set(drawn) <= set(every)
    # Of many lines the strongest are drawn, of those with the last byte some; none of byte 0.
    assert len(drawn) <= MOST_LINES
    least = min(drawn.values()) if len(every) > MOST_LINES else 0
    for place, share in every.items():
        if place not in drawn and share <= least * 1.3:
            continue
        assert drawn.get(place, 0) == pytest.approx(share, abs=0.004 * share**0.5 + 1e-4)


def test_choosing_a_layer_and_heads_draws_their_weights(opened, weights):
    opened.hover('#overview [data-layer="1"][data-head="2"]', click=True)
    assert_drawn(opened, {2: weights[1, 2]})
    opened.hover("#heads button:nth-child(1)", click=True)
    assert_drawn(opened, {0: weights[1, 0], 2: weights[1, 2]})
    assert texts(opened, "#heads [aria-pressed=true]") == ["1", "3"]
    assert texts(opened, "#map-of option") == ["layer 2, mean of 2 heads", "layer 2, head 1",
                                               "layer 2, head 3"]  # fmt: skip
    opened.run("document.querySelector('#layer').focus()")
    opened.press("ArrowLeft")
    assert texts(opened, "#layer-number") == ["1 of 2"]
    assert_drawn(opened, {0: weights[0, 0], 2: weights[0, 2]})
    opened.hover("#all-heads", click=True)
    assert_drawn(opened, dict(enumerate(weights[0])))
    assert len(lines(opened)) > MOST_LINES - 300


def test_a_mask_says_what_the_model_would_put_there(browser, tmp_path):
    path = tmp_path / "attention.html"
    path.write_text(attention(random_model("pretrained"), "the [MASK] sat").page, encoding="utf-8")
    browser.open(path)
    (told,) = texts(browser, ".fill bdi")
    assert browser.run("document.querySelector('#from-2').title") == f"model: {told}"
    assert browser.run("document.querySelector('#from-1').title") == ""
    assert browser.complaints() == []


def test_a_token_shows_its_own_lines_and_percentages(opened, weights):
    opened.hover('#overview [data-layer="0"][data-head="1"]', click=True)
    opened.hover("#heads button:nth-child(3)", click=True)
    mean = weights[0, 1:].mean(0)
    everything = lines(opened)
    opened.hover("#from-3")
    assert lines(opened) == {place: o for place, o in everything.items() if place[0] == 3}
    assert not any(texts(opened, "#from b"))
    np.testing.assert_allclose(shares(opened, "#to b"), mean[3], atol=0.007)
    best = int(mean[3].argmax())
    token = texts(opened, "#to bdi")[best]
    assert texts(opened, "#lines-note")[0].startswith(f"##ون attends to {token} ")
    opened.hover("#to-2", click=True)
    assert lines(opened) == {place: o for place, o in everything.items() if place[1] == 2}
    np.testing.assert_allclose(shares(opened, "#from b"), mean[:, 2], atol=0.007)
    opened.hover("#from-3")  # the click keeps the other
    assert {place[1] for place in lines(opened)} == {2}
    opened.hover("#to-2", click=True)
    opened.hover("h1")
    assert lines(opened) == everything


def map_opacity(browser, count):
    """(count, count): of the cells of the map."""
    pixels = browser.run(
        f"[...document.querySelector('#map-canvas').getContext('2d')"
        f".getImageData(0, 0, {count}, {count}).data]"
    )
    return np.array(pixels).reshape(count, count, 4)[:, :, 3] / 255


def test_the_map_shows_the_weights(opened, weights):
    opened.hover('#overview [data-layer="1"][data-head="0"]', click=True)
    opened.hover("#heads button:nth-child(2)", click=True)
    mean = weights[1, :2].mean(0)
    count = len(mean)
    opacity = map_opacity(opened, count)
    np.testing.assert_allclose(opacity, mean / mean.max(), atol=0.02)
    tokens = texts(opened, "#map-rows bdi")
    for place in (2, 5), (count - 1, 0), (3, count - 1):
        share = mean[place]
        opened.hover("#map-cells", (place[1] + 0.5) / count, (place[0] + 0.5) / count)
        (shown,) = shares(opened, "#map-cursor span")
        assert shown == pytest.approx(share, abs=0.007)
        (note,) = texts(opened, "#map-note")
        assert note.startswith(f"{tokens[place[0]]} attends to {tokens[place[1]]}: ")
    opened.run("(of => { of.value = '1'; of.dispatchEvent(new Event('change')) })"
               "(document.querySelector('#map-of'))")  # fmt: skip
    one = weights[1, 1]
    row, column = np.unravel_index(abs(one - mean).argmax(), mean.shape)
    assert abs(one - mean)[row, column] > 0.05
    opened.hover("#map-cells", (column + 0.5) / count, (row + 0.5) / count)
    assert shares(opened, "#map-cursor span") == pytest.approx(one[row, column], abs=0.007)


def test_leaving_out_special_tokens_and_stretching(opened, weights):
    opened.hover('#overview [data-layer="0"][data-head="0"]', click=True)
    opened.hover("#hide-special", click=True)
    special = {0, SECOND_START - 1, len(weights[0, 0]) - 1}
    drawn = lines(opened)
    assert drawn
    assert not [place for place in drawn if special & set(place[:2])]
    opened.hover("#map-cells", 0.5, 0.001)
    assert texts(opened, "#map-cursor span") == ["left out"]
    opacity = map_opacity(opened, weights.shape[-1])
    assert opacity.max() == 1
    assert not opacity[sorted(special)].any()
    assert not opacity[:, sorted(special)].any()
    opened.hover("#stretch", click=True)
    most = max(drawn.values())
    assert most < 0.99
    assert lines(opened) == pytest.approx({p: o / most for p, o in drawn.items()}, abs=2e-4)


def test_a_local_layer_shows_its_window(browser, tmp_path):
    path = tmp_path / "local.html"
    saved = small_saved("mlm", **FAMILIES["modernbert"])
    path.write_text(attention(saved, "the cat sat on a mat . a").page, encoding="utf-8")
    browser.open(path)
    browser.hover('#overview [data-layer="0"][data-head="0"]', click=True)
    assert texts(browser, "#layer-number") == ["1 of 3"]
    assert "Grey" not in texts(browser, "#map-note")[0]
    browser.hover('#overview [data-layer="2"][data-head="0"]', click=True)
    assert texts(browser, "#layer-number") == ["3 of 3, local"]
    assert "a token sees 3 tokens on each side, and" in texts(browser, "#map-note")[0]
    pixels = browser.run(
        "['#map-canvas', '#overview [data-layer=\"2\"][data-head=\"0\"] canvas'].map(name => "
        "document.querySelector(name).getContext('2d').getImageData(0, 0, 10, 1).data[4 * 9 + 3])"
    )
    assert pixels == [56, 56]
    browser.run("document.querySelector('#map-cells').focus()")
    browser.press("ArrowRight", *["ArrowRight"] * 5)
    assert texts(browser, "#map-note")[0].endswith(": outside the window")
    assert browser.complaints() == []


def test_everything_can_be_done_with_keys(opened, weights):
    opened.run("document.querySelector('#overview [tabindex=\"0\"]').focus()")
    chosen = opened.run("Object.values(document.activeElement.dataset).map(Number)")
    way = ["ArrowUp" if chosen[0] else "ArrowDown"] + ["ArrowLeft"] * chosen[1]
    opened.press(*way, "Enter")
    layer = 1 - chosen[0]
    assert_drawn(opened, {0: weights[layer, 0]})
    opened.run("document.querySelector('#all-heads').focus()")
    opened.press("Tab", "Tab")
    opened.press("Enter")
    assert_drawn(opened, {h: weights[layer, h] for h in (0, 1)})
    opened.run("document.querySelector('#stretch').focus()")
    opened.press("Tab", "ArrowDown", "ArrowDown", "Enter")
    assert {place[0] for place in lines(opened)} == {2}
    assert opened.run("document.activeElement.getAttribute('aria-activedescendant')") == "from-2"
    opened.press("Tab", "Escape", "End")
    assert {place[1] for place in lines(opened)} == {weights.shape[-1] - 1}
    opened.press("Tab", "Tab", "ArrowRight")
    share = weights[layer, :2].mean(0)[0, 1]
    assert shares(opened, "#map-cursor span") == pytest.approx(share, abs=0.007)


def test_tokens_are_text_in_their_own_direction(opened):
    tokens = texts(opened, "#from bdi")
    assert tokens[:9] == ["[CLS]", "قال", "الرجل", "##ون", "the", "cat", "动", "物", "[SEP]"]
    assert opened.run("document.querySelectorAll('script').length") == 2
    directions = opened.run(
        "[...document.querySelectorAll('#from bdi, .text')].map(e => getComputedStyle(e).direction)"
    )
    assert texts(opened, ".text") == [TEXT, ATTACK]
    words = [TEXT, ATTACK, *tokens]
    expected = ["rtl" if any("\u0590" < c < "\u0700" for c in word) else "ltr" for word in words]
    assert directions == expected


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_text_stays_inside_the_window(browser, saved, tmp_path, width):
    path = tmp_path / "long.html"
    path.write_text(attention(saved, "the cat sat on a mat . " * 20).page, encoding="utf-8")
    browser.open(path, width=width, height=800, dark=width == 390)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.hover("#all-heads", click=True)
    browser.hover("h1")
    assert len(lines(browser)) <= MOST_LINES
    browser.hover("#from-130")
    assert len(lines(browser)) > 200
    body = "document.querySelector('#map-panel .body')"
    browser.run(f"{body}.scrollTo(300, 300)")  # the labels stay in sight
    assert browser.run(f"[{body}.scrollLeft, {body}.scrollTop]") == [300, 300]
    assert browser.run(
        "((panel, rows, columns) => rows.left >= panel.left && columns.top >= panel.top)"
        "(...['#map-panel', '#map-rows', '#map-columns'].map("
        "id => document.querySelector(id).getBoundingClientRect()))"
    )
    assert browser.complaints() == []


def test_the_policy_of_the_page_stops_what_gets_into_it(opened):
    """The test of `complaints` and of the policy: nothing is loaded, and trying is noticed."""
    opened.run(
        "(image => { image.src = 'https://example.org/x.png'; document.body.append(image) })"
        "(document.createElement('img'))"
    )
    found = [e["params"]["entry"]["text"] for e in opened.complaints() if "entry" in e["params"]]
    assert [text for text in found if "Content Security Policy" in text]
    opened.events.clear()
