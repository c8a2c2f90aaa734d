"""One file that tells all that a loader knows of itself: a page for people, with its numbers inside as JSON.

    looks, Statistics, Explanation, settings ─▶ report_content ─▶ (dict) ─▶ write_document ─▶ one HTML file

Runs in: the trainer, on whichever thread asks. It may import `epochs` and what is below, and matplotlib where pictures
are drawn; without it there are none. Open first: `content` (what is told), then `document` (the page), `pictures`.
"""
