"""The page in a real browser: what it shows, how it is moved in, and what it must not do."""

import asyncio
import contextlib
import hashlib

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import expect

from gymrl.types import ImageRef, Turn
from gymrl.viewer import ViewerOptions, open_viewer
from tests.evaluation_files import add_rows, plan_of
from tests.integration.viewer.sample import HOSTILE, TOKENIZER, png
from tests.rollout_files import failure, trajectory, write_rollouts

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    # Some look at every page; a busy machine gets time for that.
    pytest.mark.timeout(240),
]
PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)

EVERY_PAGE = (
    "/",
    "/?sort=-mean&failure=any",
    "/rows",
    "/rows?q=window",
    "/group/0",
    "/group/2",
    "/row/2",
    "/row/2?mode=version",
    "/row/2?tab=conversation",
    "/row/2?tab=raw",
    "/row/5",
    "/row/6",
    "/row/6?tab=conversation",
    "/row/7",
    "/row/8?tab=conversation",
    "/compare/2/3",
    "/compare/6/7",
)


class Tab:
    """A page of the viewer, and everything that went wrong on it."""

    def __init__(self, page, base):
        self.page = page
        self.base = base
        self.wrong = []
        self.asked = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on(
            "console", lambda message: message.type == "error" and self.wrong.append(message.text)
        )
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    async def open(self, path):
        await self.page.goto(self.base + path)
        await self.settled()

    async def visit(self, path):
        """Go there as a link inside the page does, and wait until all of it is there."""
        await self.page.evaluate(
            "(path) => { history.pushState(null, '', path); dispatchEvent(new PopStateEvent('popstate')); }",
            path,
        )
        await self.settled()
        # What is near the window has come: tokens, the first level of the JSON, images.
        await self.until(
            "() => ![...document.querySelectorAll('.chunk:empty')].some((one) =>"
            " one.checkVisibility() && one.getBoundingClientRect().top < innerHeight)"
            " && ![...document.querySelectorAll('.raw-tree > span')].some((one) =>"
            " one.textContent === '…')"
            " && [...document.images].every((one) => one.complete)"
        )

    async def until(self, condition, argument=None):
        """Playwright's own waiting would evaluate text in the page, which the page forbids."""
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while not await self.page.evaluate(condition, argument):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.02)

    async def settled(self):
        await self.page.wait_for_selector("main[aria-busy=false]")

    async def press(self, *keys):
        for key in keys:
            await self.page.keyboard.press(key)

    async def at(self, pattern):
        """The address has become this, and its view is there."""
        await self.until("(pattern) => new RegExp(pattern).test(location.href)", pattern)
        await self.settled()

    def text(self, selector):
        return self.page.locator(selector)


@pytest_asyncio.fixture(loop_scope="session")
async def viewers():
    """Opens viewers; they are there until every tab is closed, as pages ask them each second."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(path, options=None):
            return await stack.enter_async_context(open_viewer(path, options))

        yield start


@pytest_asyncio.fixture(loop_scope="session")
async def tabs(browser, viewers):
    """Opens pages of their own; ends with none of them having complained."""
    opened = []

    async def open_tab(viewer, path="/", **options):
        context = await browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        tab = Tab(await context.new_page(), viewer.url.rstrip("/"))
        opened.append((context, tab))
        await tab.open(path)
        return tab

    yield open_tab
    for context, _ in opened:
        await context.close()
    assert [tab.wrong for _, tab in opened] == [[] for _ in opened]


@pytest_asyncio.fixture(loop_scope="session")
async def viewer(sample, viewers):
    return await viewers(sample, ViewerOptions(poll_s=0.02))


async def test_groups_are_listed_and_sorted_and_filtered_by_their_address(viewer, tabs):
    tab = await tabs(viewer)
    rows = tab.text("tbody tr")
    await expect(rows).to_have_count(4)
    await expect(rows.first).to_contain_text("task 0")
    await expect(rows.nth(1).locator(".bar")).to_have_count(2)
    await expect(rows.nth(1).locator(".bar").nth(1)).to_have_attribute(
        "aria-label", "attempt 1: failed (infra: RolloutTimeout)"
    )

    await tab.page.get_by_role("link", name="Mean").click()
    await tab.at(r"\?sort=-mean$")
    await expect(tab.text("th[aria-sort=descending]")).to_contain_text("Mean")
    await expect(rows.first.locator("td").first).to_have_text("2")

    await tab.page.get_by_label("Failure").focus()
    await tab.page.get_by_label("Failure").select_option(label="failed")
    await tab.at(r"failure=any")
    await expect(rows).to_have_count(2)
    await expect(tab.page.get_by_label("Failure")).to_be_focused()
    await tab.page.reload()
    await tab.settled()
    await expect(rows).to_have_count(2)
    await expect(tab.page.get_by_label("Failure")).to_have_value("any")
    await tab.page.go_back()
    await tab.at(r"\?sort=-mean$")
    await expect(rows).to_have_count(4)
    await tab.page.go_forward()
    await tab.page.get_by_role("link", name="Clear").click()
    await tab.at(r"/$")
    await expect(rows).to_have_count(4)


async def test_the_keyboard_goes_everywhere(viewer, tabs):
    tab = await tabs(viewer)
    await tab.press("j", "j", "k", "j")
    await expect(tab.text(".item:focus")).to_have_attribute("href", "/group/1")
    await tab.press("ArrowUp", "Enter")
    await tab.at(r"/group/0$")
    await tab.press("j", "Enter")
    await tab.at(r"/row/2$")
    await tab.press("]")
    await tab.at(r"/row/3$")
    await tab.press("[")
    await tab.at(r"/row/2$")
    await tab.press("2")
    await tab.at(r"tab=conversation")
    await tab.press("n")
    await tab.at(r"/row/4\?tab=conversation")
    await tab.press("1", "p")
    await tab.at(r"/row/2\?tab=tokens")
    await tab.press("c")
    await tab.at(r"/compare/2/3$")
    await tab.press("Escape")
    await tab.at(r"/group/0$")
    await tab.press("Escape")
    await tab.at(r"/$")
    await expect(tab.text(".item:focus")).to_have_attribute("href", "/group/0")

    await tab.press("?")
    await expect(tab.page.get_by_role("dialog")).to_contain_text("side by side")
    await tab.press("Escape")
    await expect(tab.page.get_by_role("dialog")).to_be_hidden()
    await tab.press("r")
    await tab.at(r"/rows$")
    await tab.press("/")
    await expect(tab.page.get_by_role("searchbox")).to_be_focused()


async def test_a_search_lists_what_it_finds_with_its_surroundings(viewer, tabs):
    tab = await tabs(viewer)
    await tab.press("/")
    await tab.page.keyboard.type("call_7")
    await tab.press("Enter")
    await tab.at(r"/rows\?q=call_7$")
    await expect(tab.text("tbody tr")).to_have_count(1)
    await expect(tab.text(".snippet")).to_contain_text('"call_id":"call_7"')
    await expect(tab.page.get_by_text("1 match in 7 rollouts")).to_be_visible()
    await tab.page.go_back()
    await tab.at(r"/$")
    await expect(tab.text("tbody tr")).to_have_count(4)


async def test_tokens_are_coloured_by_logprob_mask_and_weights(viewer, tabs):
    tab = await tabs(viewer, "/row/2")
    tokens = tab.text(".sequence .t")
    await expect(tokens).to_have_text(["10", "11", "12", "13", "14", "15", "16", "17"])
    classes = [await tokens.nth(place).get_attribute("class") for place in range(8)]
    assert classes == [
        *["t p"] * 3,
        *["t g lp1 v0", "t g lp7 v0"],
        "t p",
        *["t g lp3 v1", "t g lp5 v1"],
    ]

    async def paint(place):
        return await tokens.nth(place).evaluate("(one) => getComputedStyle(one).backgroundColor")

    assert len({await paint(3), await paint(4), await paint(7)}) == 3
    await tab.page.get_by_role("radio", name="mask").check()
    await tab.at(r"mode=mask")
    assert await paint(3) == await paint(4) == await paint(7)
    assert await paint(0) == "rgba(0, 0, 0, 0)"
    await tab.press("m")
    await tab.at(r"mode=version")
    assert await paint(3) == await paint(4) != await paint(7)
    await expect(tab.text(".legend")).to_have_text("step-10step-11")


async def test_the_arrows_walk_over_tokens_and_say_what_each_is(viewer, tabs):
    tab = await tabs(viewer, "/row/2")
    await tab.page.get_by_role("group", name="Sampled tokens of turn 1").focus()
    inspector = tab.text("#inspector")
    await expect(inspector).to_have_text(
        "id 13position 3turn 1logprob \N{MINUS SIGN}0.0500probability 95.1%weights step-10"
    )
    await tab.press("ArrowRight", "ArrowRight")
    await expect(inspector).to_contain_text("id 14position 4turn 1logprob \N{MINUS SIGN}9.0000")
    await tab.press("Home")
    await expect(inspector).to_contain_text("id 13")
    await tab.press("ArrowRight", "Enter")
    await tab.at(r"/row/2#t4$")

    await tab.page.reload()
    await tab.settled()
    await expect(inspector).to_contain_text("id 14")
    await expect(tab.text(".t.cur")).to_have_text("14")
    await tab.text(".sequence .t").first.hover()
    await expect(inspector).to_have_text("id 10position 0turn 1prompt")
    await tab.page.get_by_role("button", name="\N{MINUS SIGN}2.50 at 7").click()
    await expect(inspector).to_contain_text("id 17")


async def test_tokens_that_come_after_the_focus_are_walked_over_as_well(viewer, tabs):
    tab = await tabs(viewer)
    is_focused = asyncio.Event()

    async def hold_back(route):
        await is_focused.wait()
        await route.continue_()

    await tab.page.route("**/tokens?*", hold_back)
    await tab.open("/row/2")
    await tab.page.get_by_role("group", name="Sampled tokens of turn 1").focus()
    is_focused.set()
    await expect(tab.text("#inspector")).to_contain_text("id 13position 3")
    await tab.press("ArrowRight")
    await expect(tab.text("#inspector")).to_contain_text("id 14position 4")


async def test_texts_of_tokens_with_a_tokenizer(sample, viewers, tabs):
    viewer = await viewers(sample, ViewerOptions(tokenizer=TOKENIZER))
    tab = await tabs(viewer, "/row/2")
    first = tab.text(".sequence .t").first
    shown = await first.text_content()
    assert shown != "10"
    await tab.press("i")
    await expect(first).to_have_text("10")
    await tab.at(r"show=ids")
    await first.hover()
    await expect(tab.text("#inspector code")).to_have_text(f'"{shown}"')


async def test_a_rollout_shows_why_it_is_worth_what_it_is(viewer, tabs):
    tab = await tabs(viewer, "/row/2")
    aside = tab.page.get_by_role("complementary")
    ledger = aside.locator(".ledger tbody tr")
    await expect(ledger).to_have_text(["verifier1", "effort\N{MINUS SIGN}0.50.5"])
    for text in (
        "right0.75",
        "short0.25",
        "scorer_error2",
        "step-10tokens 3\N{EN DASH}5",
        "step-11",
    ):
        await expect(aside).to_contain_text(text)
    await expect(tab.text("h3")).to_have_text(["Turn 1", "Turn 2"])
    await expect(tab.text(".generation .said").first).to_have_text("add(2, 2)")
    await tab.page.get_by_label("Sequence").select_option("1")
    await tab.at(r"sequence=1")
    await expect(tab.text(".sequence .t")).to_have_text(["40", "41", "42"])


async def test_a_conversation_shows_calls_results_and_images(viewer, tabs):
    tab = await tabs(viewer, "/row/2?tab=conversation")
    await expect(tab.text(".item-head")).to_have_text(
        [
            "user",
            "Reasoningrollout",
            "Tool calladdcall_7rollout",
            "Tool resultcall_7rollout",
            "assistantrollout",
        ]
    )
    await expect(tab.text(".call pre")).to_have_text('{\n  "a": 2,\n  "b": 2\n}')

    await tab.open("/row/8?tab=conversation")
    image = tab.page.get_by_role("img", name="Image 1 of the conversation")
    await expect(image).to_be_visible()
    size = "(one) => one.decode().then(() => [one.naturalWidth, one.naturalHeight])"
    assert await image.evaluate(size) == [8, 6]
    await expect(tab.page.get_by_text("Image elsewhere, not fetched")).to_contain_text(
        "https://example.invalid/cat.png"
    )


async def test_a_turn_shows_its_images_and_a_token_its_experts(tmp_path, viewers, tabs):
    digest = hashlib.sha256(png()).hexdigest()
    shown = ImageRef(digest=digest, media_type="image/png", width=8, height=6)
    routes = np.arange(5 * 2 * 3, dtype=np.int8).reshape(5, 2, 3)
    made = trajectory(images=((shown,),), media={digest: png()}, routed_experts=routes)
    viewer = await viewers(write_rollouts(tmp_path / "r.jsonl", [made]))
    tab = await tabs(viewer, "/row/2#t4")
    image = tab.page.get_by_role("img", name="Image of turn 1, 8 by 6 pixels")
    await expect(image).to_be_visible()
    assert await image.evaluate("(one) => one.decode().then(() => one.naturalWidth)") == 8
    await expect(tab.page.get_by_role("complementary")).to_contain_text("3 in each of 2 layers")
    await tab.page.get_by_role("button", name="Experts").click()
    await expect(tab.text(".experts")).to_have_text("experts by layer 24 25 26 | 27 28 29")


async def test_a_failure_shows_its_facts_and_its_traceback(viewer, tabs):
    tab = await tabs(viewer, "/row/5")
    failed = tab.page.get_by_role("region", name="Failure")
    for text in ("RolloutTimeout infra", "no answer within 30 s", "instancecalc", "status504"):
        await expect(failed).to_contain_text(text)
    await expect(failed.locator(".traceback")).to_contain_text("Traceback (most recent call last)")


async def test_the_raw_json_is_asked_for_level_by_level(viewer, tabs):
    tab = await tabs(viewer, "/row/2?tab=raw")
    await expect(tab.page.get_by_text("trajectory { ")).to_be_visible()
    assert sum("/raw?" in url for url in tab.asked) == 1
    await tab.page.get_by_text("trajectory { ").click()
    await tab.page.get_by_text("token_ids [ 8 ]").click()
    await expect(tab.page.get_by_text("7: 17")).to_be_visible()
    assert sum("/raw?" in url for url in tab.asked) == 3


async def test_marks_of_the_reports_charts_are_on_no_other_page(viewer, tabs):
    tab = await tabs(viewer, "/row/2?tab=raw")
    await tab.until("() => document.querySelector('.raw .key')")
    for path, keys in (("/row/2?tab=raw", ".raw .key"), ("/row/2", ".key:has(.legend)")):
        await tab.visit(path)
        before = f"getComputedStyle(document.querySelector({keys!r}), '::before').content"
        assert await tab.page.evaluate(before) == "none"


async def test_two_rollouts_side_by_side_and_where_they_part(viewer, tabs):
    tab = await tabs(viewer, "/group/0")
    await tab.page.get_by_label("Compare attempt 0").check()
    await tab.page.get_by_label("Compare attempt 1").check()
    await tab.page.get_by_role("link", name="Show side by side").click()
    await tab.at(r"/compare/2/3$")
    await expect(tab.page.get_by_text("they differ from token 4 on")).to_be_visible()
    await expect(tab.text(".t.diff")).to_have_text(["14", "24"])
    await tab.press("d")
    await expect(tab.text(".t.cur")).to_have_text(["14", "24"])
    await tab.page.get_by_label("Attempt on the right").select_option("2")
    await tab.at(r"/compare/2/2$")
    await expect(tab.page.get_by_text("The same tokens throughout.")).to_be_visible()


async def test_what_a_model_wrote_stays_text_and_nothing_leaves_the_machine(viewer, tabs):
    tab = await tabs(viewer)
    for path in EVERY_PAGE:
        await tab.visit(path)
        assert await tab.page.evaluate("window.pwned === undefined")
        assert await tab.page.locator("script:not([src])").count() == 0
    await tab.open("/row/6?tab=conversation")
    await expect(tab.text(".call .item-head code")).to_have_text(HOSTILE)
    assert await tab.page.locator("main img").count() == 0
    assert {url for url in tab.asked if not url.startswith(tab.base + "/")} == set()


async def test_texts_that_turn_around_their_neighbours_and_crowded_groups_leave_a_page_to_read(
    tmp_path, viewers, tabs
):
    turning = "\u202etxt.exe\u202c"
    crowd = [trajectory(reward=float(place % 5), agent=turning) for place in range(100)]
    path = write_rollouts(tmp_path / "rollouts.jsonl", crowd, prompts={0: turning})
    viewer = await viewers(path, ViewerOptions(poll_s=0.02))
    tab = await tabs(viewer, "/group/0")
    assert await tab.text(".list-head .bar").count() == 64
    await expect(tab.text(".list-head .strip .muted")).to_have_text("+36")
    await expect(tab.text(".group-prompt")).to_have_text("⟨U+202E⟩txt.exe⟨U+202C⟩")
    await tab.visit("/row/80")
    assert await tab.text(".strip .bar").count() == 64
    assert await tab.text(".strip .bar[aria-current]").count() == 1


async def test_the_page_itself_may_not_make_markup_of_text(viewer, tabs):
    tab = await tabs(viewer)
    refused = await tab.page.evaluate(
        "(text) => { try { document.body.innerHTML = text; return false; }"
        " catch (error) { return error instanceof TypeError; } }",
        HOSTILE,
    )
    assert refused
    tab.wrong.clear()


async def test_small_screens_show_every_page_without_moving_it_sideways(viewer, tabs):
    tab = await tabs(viewer, viewport={"width": 360, "height": 700})
    for path in EVERY_PAGE:
        await tab.visit(path)
        widths = await tab.page.evaluate(
            "[document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert (path, widths[0]) == (path, widths[1])


# Contrast as WCAG 2 defines it, of every visible text on what is behind it.
CONTRAST = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(parse(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("[aria-hidden=true], svg")) continue;
    const ground = behind(element);
    const ink = over(parse(getComputedStyle(element).color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([element.className || element.tagName, ratio.toFixed(2)]);
  }
  return low;
}"""


async def test_every_text_stands_out_from_what_is_behind_it_by_day_and_by_night(viewer, tabs):
    tab = await tabs(viewer)
    for path in EVERY_PAGE:
        await tab.visit(path)
        for scheme in ("light", "dark"):
            await tab.page.emulate_media(color_scheme=scheme)
            low = await tab.page.evaluate(CONTRAST)
            assert (path, scheme, low) == (path, scheme, [])


async def test_landmarks_and_names_are_there_for_who_does_not_see_the_page(viewer, tabs):
    tab = await tabs(viewer)
    for path in EVERY_PAGE:
        await tab.visit(path)
        for role in ("banner", "main", "search"):
            await expect(tab.page.get_by_role(role)).to_have_count(1)
        await expect(tab.page.get_by_role("heading", level=1)).to_have_count(1)
        nameless = await tab.page.evaluate(
            "[...document.querySelectorAll('a, button, input, select')].filter((one) =>"
            " !(one.textContent.trim() || one.ariaLabel || one.labels?.length)).length"
        )
        assert (path, nameless) == (path, 0)


async def test_the_focus_is_always_visible(viewer, tabs):
    tab = await tabs(viewer)
    for _ in range(12):
        await tab.press("Tab")
        style = await tab.page.evaluate(
            "getComputedStyle(document.activeElement).outlineStyle + ' ' +"
            " (document.activeElement.closest('.switch') ? 'switch' : '')"
        )
        assert style.startswith(("solid", "auto")) or "switch" in style


async def test_a_hundred_thousand_tokens_keep_the_page_small(tmp_path, viewers, tabs):
    length, prompt = 100_000, 30_000
    made = trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.concatenate(
            [np.zeros(prompt), -np.abs(np.sin(np.arange(length - prompt)))]
        ).astype(np.float32),
        turns=(Turn(start=0, generation_start=prompt, end=length),),
    )
    path = write_rollouts(tmp_path / "long.jsonl", [made])
    viewer = await viewers(path)
    tab = await tabs(viewer, "/row/2")
    tokens = tab.text(".sequence .t")
    await expect(tokens.first).to_be_visible()
    assert await tokens.count() < 15_000
    await tab.open("/row/2?show=ids#t99998")
    await expect(tab.text(".t.cur")).to_have_text("99998")
    await expect(tab.text("#inspector")).to_contain_text("position 99,998")
    await tab.press("End")
    await expect(tab.text(".t.cur")).to_have_text("99999")
    await tab.press("Home")
    await expect(tab.text(".t.cur")).to_have_text("30000")
    await tab.press("ArrowDown")
    below = int(await tab.text(".t.cur").text_content())
    assert below > 30005
    await tab.press("ArrowUp")
    await expect(tab.text(".t.cur")).to_have_text("30000")
    assert await tokens.count() < 15_000


async def test_rows_that_are_written_meanwhile_appear_and_the_focus_stays(viewer, sample, tabs):
    tab = await tabs(viewer)
    await tab.press("j", "j")
    write_rollouts(sample, [failure(), trajectory()], append=True, first=9)
    await expect(tab.text("tbody tr")).to_have_count(5)
    await expect(tab.text("#status")).to_contain_text("9 rows, 5 groups")
    await expect(tab.text(".item:focus")).to_have_attribute("href", "/group/1")

    with sample.open("ab") as end:
        end.write(b"{broken\n")
    await expect(tab.text("#status")).to_contain_text("1 broken line")
    await tab.page.get_by_text("1 broken line").click()
    await expect(tab.text(".broken li")).to_contain_text("Line 11:")


async def test_a_file_that_is_replaced_is_shown_anew_and_says_so(viewer, sample, tmp_path, tabs):
    tab = await tabs(viewer)
    write_rollouts(tmp_path / "other.jsonl", [trajectory()], prompts={0: "quite new"}).replace(
        sample
    )
    await expect(tab.page.get_by_role("alert")).to_contain_text("replaced or rewritten")
    await expect(tab.text("tbody tr")).to_contain_text("quite new")


async def test_a_row_that_is_not_whole_shows_its_json(viewer, sample, tabs):
    tab = await tabs(viewer, "/rows")
    line = sample.read_bytes().splitlines(keepends=True)[1]
    with sample.open("ab") as end:
        end.write(line.replace(b'"logprobs":[', b'"logprobs":["x",').replace(b"math_a", b"new_a"))
    await expect(tab.page.get_by_label("Agent").get_by_text("new_agent")).to_have_count(1)
    await tab.open("/row/9")
    await expect(tab.text(".problem")).to_contain_text("line 9 is no record of a row")
    await expect(tab.text(".raw-tree")).to_contain_text("rollout_id")
    tab.wrong.clear()


async def test_what_is_not_there_is_said_in_the_page(viewer, tabs):
    tab = await tabs(viewer, "/row/999")
    await expect(tab.text("main")).to_contain_text("line 999 is no row of this file")
    await tab.open("/?sort=colour")
    await expect(tab.text("main")).to_contain_text("sort=colour is not known")
    tab.wrong.clear()


async def test_a_token_in_the_address_opens_the_page_and_is_gone_from_it(sample, viewers, tabs):
    viewer = await viewers(sample, ViewerOptions(token="s3cret"))
    context_base = viewer.url.split("?")[0]
    tab = await tabs(viewer, "")
    assert tab.page.url == context_base
    await expect(tab.text("tbody tr")).to_have_count(4)


EVALUATION = plan_of(
    {"math": {f"sum-{n}": "sums" if n % 2 else "tables" for n in range(60)}, HOSTILE: {"w": "w"}}, 2
)
EVALUATED = [(f"sum-{n}", repeat, n / 59) for n in range(58) for repeat in (0, 1)]


async def test_an_evaluations_report_is_shown_walked_through_and_follows_the_run(
    tmp_path, viewers, tabs
):
    file = add_rows(tmp_path, EVALUATION, *EVALUATED, ("sum-58", 0, None), ("w", 0, 1.0))
    viewer = await viewers(file, ViewerOptions(poll_s=0.02))
    tab = await tabs(viewer)
    await tab.page.get_by_role("link", name="Report").wait_for()
    await tab.press("e")
    await tab.at(r"/report$")
    await expect(tab.text(".report-note")).to_contain_text("1 row failed and 4 are missing")
    math = tab.page.get_by_role("region", name="math")
    # 58 means from 0 to 57/59: their deviation is 0.2862, t(57) is 2.0025.
    await expect(math.locator(".total").first).to_have_text("0.483 [0.408, 0.558]")
    await expect(math.locator(".failure")).to_contain_text("RolloutTimeout 1 row")
    await expect(math.get_by_role("img").first).to_have_attribute(
        "aria-label", "pass@1 0.000, pass@2 0.000"
    )
    await expect(math.locator(".charts").first.locator("rect")).to_have_count(20)
    await math.get_by_text("tables: ").click()

    add_rows(tmp_path, EVALUATION, ("sum-58", 0, 1.0), ("sum-58", 1, 1.0))
    await expect(tab.text(".report-note")).to_contain_text("0 rows failed and 3 are missing")
    await expect(math.locator("details[open] summary")).to_contain_text("tables: ")

    await tab.page.get_by_role("link", name="All 60 tasks").click()
    await tab.at(r"benchmark=math$")
    await expect(tab.text("h1")).to_have_text("math")
    await tab.page.get_by_role("link", name="Mean").click()
    await tab.at(r"sort=mean")
    await tab.press("n")
    await tab.at(r"offset=50")
    await expect(tab.text("tbody .item").last).to_have_text("sum-58")
    await tab.press("j", "Enter")
    await tab.at(r"/group/50$")
    await expect(tab.text(".group-prompt")).to_have_text("solve sum-50")


async def test_a_report_and_a_comparison_are_for_every_screen_and_every_eye(
    tmp_path, viewers, tabs
):
    file = add_rows(tmp_path, EVALUATION, *EVALUATED, ("sum-58", 0, None), ("w", 0, 1.0))
    before = [("sum-7", 0, 1.0), ("sum-8", 0, 0.0), ("w", 0, 0.0)]
    add_rows(tmp_path / "before", EVALUATION, *before)
    options = ViewerOptions(poll_s=0.02, against=str(tmp_path / "before"))
    viewer = await viewers(file, options)
    tab = await tabs(viewer, viewport={"width": 360, "height": 700})
    for path in ("/report", "/report?benchmark=math&sort=-failed", "/against"):
        await tab.visit(path)
        await tab.page.evaluate(
            "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
        )
        for scheme in ("light", "dark"):
            await tab.page.emulate_media(color_scheme=scheme)
            low = await tab.page.evaluate(CONTRAST)
            assert (path, scheme, low) == (path, scheme, [])
        assert await tab.page.evaluate("document.documentElement.scrollWidth") == 360
        await expect(tab.page.get_by_role("heading", level=1)).to_have_count(1)
    math = tab.page.get_by_role("region", name="math")
    await expect(math).to_contain_text("58 tasks without a reward in A or B")
    await expect(math.get_by_role("img").locator("rect")).to_have_count(2)
    await expect(math.get_by_role("link")).to_have_text(["sum-7", "sum-8"])
    await tab.press("j", "Enter")
    await tab.at("/group/7$")
    await tab.open("/report?benchmark=none")
    await expect(tab.text("main")).to_contain_text("There is no benchmark none")
