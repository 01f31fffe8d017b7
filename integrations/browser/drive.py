"""Open a board in Chromium as a person would, and print as JSON lines what it shows.

    drive.py URL FOLDER        screenshots go to FOLDER

First a line of the page as a batch runs; then, while something ends the coordinator, a line of how it went away and
came back. Called by tests/live/deployed/test_board_browser.py, in an environment of its own.
"""

import json
import sys
import time
from itertools import pairwise

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")
WAIT_S = 120
UPDATES = 4


def browser(width: int, height: int) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))


def texts(page: webdriver.Chrome, selector: str) -> list[str]:
    """What the elements say, at one moment: the page may replace them at the next."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
    return page.execute_script(script, selector)


def run(page: webdriver.Chrome, folder: str) -> dict:
    """What the page shows while a batch runs, with the seconds between updates."""

    def text(selector: str) -> str:
        return "".join(texts(page, selector))  # nothing while there is no such element

    def until(condition):
        return WebDriverWait(page, WAIT_S, poll_frequency=0.1).until(lambda _: condition())

    until(lambda: page.find_elements(By.CSS_SELECTOR, "#longest button") and "tokens" in text("#numbers"))
    times = []
    while len(times) < UPDATES:
        seen = text("#state")
        until(lambda seen=seen: text("#state") != seen)
        times.append(time.monotonic())
    found = {
        "replicas": len(page.find_elements(By.CSS_SELECTOR, "#replicas tbody tr")),
        "batches": [row.split()[0] for row in texts(page, "#batches tbody tr")],
        "longest": len(page.find_elements(By.CSS_SELECTOR, "#longest tbody tr")),
        "updates_s": [round(after - before, 2) for before, after in pairwise(times)],
    }
    page.save_screenshot(f"{folder}/board.png")
    page.execute_script("document.querySelector('#longest button').focus()")
    page.switch_to.active_element.send_keys("\n")  # by keyboard
    until(lambda: text("#chunks tbody") and ("ended" in text("#sample-said") or len(text("#text")) > 20))
    chunks = texts(page, "#chunks tbody tr")
    found["sample"] = {"name": text("#sample-name"), "said": text("#sample-said"), "text": len(text("#text"))}
    found["sample"]["chunks"] = chunks
    page.save_screenshot(f"{folder}/sample.png")
    page.find_element(By.ID, "close").click()
    return found


def narrow(page: webdriver.Chrome, folder: str) -> dict:
    """On a phone's width, in the dark."""
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(2.0)
    page.save_screenshot(f"{folder}/narrow.png")
    width, paper = page.execute_script(
        "return [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
    )
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return {"narrow_width": width, "dark_paper": paper}


def away(page: webdriver.Chrome) -> dict:
    """Waits until the page says that the service is away, and then that it is live again."""
    state = page.find_element(By.ID, "state")
    wait = WebDriverWait(page, WAIT_S, poll_frequency=0.1)
    wait.until(lambda _: "away" in state.text)
    wait.until(lambda _: "live" in state.text)
    wait.until(lambda _: len(page.find_elements(By.CSS_SELECTOR, "#replicas tbody tr")) == 2)
    return {"news": wait.until(lambda _: texts(page, "#news li"))}  # it comes with a later update


def main(url: str, folder: str) -> None:
    page = browser(1400, 1100)
    try:
        page.get(url)
        print(json.dumps(run(page, folder) | narrow(page, folder)), flush=True)
        found = away(page)
        print(json.dumps(found | {"errors": [entry["message"] for entry in page.get_log("browser")]}), flush=True)
    finally:
        page.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
