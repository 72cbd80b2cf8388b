"""The page `/dashboard/reasons`: for each reason why a token was computed, what it means and what to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from kvtier.tiers.naming.tier import Reason


@dataclass(frozen=True, slots=True)
class ReasonText:
    """The explanation of a reason: its *meaning*, and what an operator can *do* about it."""

    meaning: str
    do: str


_WHY = "kvtier explain REQUEST_ID shows for one request which block was missed, and why."

REASON_TEXTS: Mapping[Reason, ReasonText] = {
    Reason.NEVER_SEEN: ReasonText(
        "No earlier prompt had this prefix.",
        "Nothing, if the prompts are new. If prompts that should share a prefix do not, look for text at their "
        f"beginning that varies, such as a date, a user's name or a request's id, and move it to the end. {_WHY}",
    ),
    Reason.EVICTED_FROM_DEVICE: ReasonText(
        "The block was in device memory only, and was evicted before it was copied to a lower tier.",
        "Give kvtier a host tier (--host-memory), or a larger one. If there is one, copies are too slow for the load: "
        "see 'Copies between tiers'.",
    ),
    Reason.EVICTED_FROM_HOST: ReasonText(
        "The last copy of the block was in host memory, and was evicted to make room.",
        "Add a disk tier (--disk PATH:SIZE), or give more host memory. The section 'If a tier were smaller or larger' "
        "shows what more memory would give.",
    ),
    Reason.EVICTED_FROM_DISK: ReasonText(
        "The last copy of the block was on disk, and was evicted to make room.",
        "Give the disk tier more space. The section 'If a tier were smaller or larger' shows what it would give.",
    ),
    Reason.EVICTED_FROM_REMOTE: ReasonText(
        "The remote store reported the block, but no longer had it when kvtier read it.",
        "Look at the remote store's own memory limit and eviction policy.",
    ),
    Reason.NOT_KEPT: ReasonText(
        "The tokens were computed before, but kvtier kept no recurrent state (or window) for resuming after them.",
        "Nothing, if it happens once for a prefix: a state is kept where two prompts diverge, for the third one. To "
        "keep more states, lower device.retention_tokens, which takes more memory for states.",
    ),
    Reason.CAPACITY: ReasonText(
        "The block was a hit in a lower tier, but device memory had no free slot to load it into.",
        "Give more device memory (--device-memory), or let fewer requests run at once (scheduler.max_running).",
    ),
    Reason.CORRUPT: ReasonText(
        "The block was a hit, but its bytes differed from the stored ones. kvtier discarded it.",
        "One block can be a bit error. If the number grows, test the drive (smartctl) and the memory (memtest86+, or "
        "the kernel's log of ECC errors).",
    ),
    Reason.FAILED: ReasonText(
        "The block was a hit, but reading or copying it failed.",
        "The section 'Health' and the log name the error of the store or the drive.",
    ),
    Reason.DEADLINE: ReasonText(
        "The block was a hit, but the copy to the device took too long, so the request went on without it.",
        "If it happens often, the drive or the network is overloaded: see 'Copies between tiers'. In the vLLM "
        "connector the limit is deadline_ms.",
    ),
    Reason.COST: ReasonText(
        "The block was a hit, but kvtier expected computing it to be faster than loading it.",
        "Nothing: this saves time. A faster drive would turn these tokens into hits.",
    ),
    Reason.SKIPPED: ReasonText(
        "The request asked not to read the cache, or to read only part of it.",
        "Nothing, unless the client sets this option by mistake.",
    ),
    Reason.SCORED: ReasonText(
        "The block was a hit, but the request asked for log probabilities of its prompt, which must be computed.",
        "Ask for log probabilities of the prompt only where they are needed.",
    ),
    Reason.ABORTED: ReasonText(
        "The request ended before its prefix was loaded, for example because the client closed the connection.",
        "If clients give up often, look at the time to first token and at the clients' timeouts.",
    ),
    Reason.LAST_BLOCK: ReasonText(
        "A prompt's last token is always computed, because the first output token depends on its result. The other "
        "tokens of its block are computed with it, unless kvtier can copy them from a cached block on the device.",
        "Nothing. It is at most one block for each request.",
    ),
}


def reasons_page() -> bytes:
    """Return the HTML page with the explanations, each with the reason's name as its anchor."""
    items = "\n".join(
        f"""      <section class="card" id="{reason}" aria-labelledby="{reason}-title">
        <h2 id="{reason}-title">{escape(reason.replace("_", " "))}</h2>
        <p>{escape(text.meaning)}</p>
        <p><strong>What to do:</strong> {escape(text.do)}</p>
      </section>"""
        for reason, text in REASON_TEXTS.items()
    )
    return f"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8" />
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <meta name="color-scheme" content="light dark" />
    <title>Why tokens were computed · kvtier</title>
    <link rel="icon" href="page/icon.svg" type="image/svg+xml" />
    <link rel="stylesheet" href="page/dashboard.css" />
    <script src="page/theme.js"></script>
  </head>
  <body class="reading">
    <main id="main">
      <p><a href="../dashboard">Back to the dashboard</a></p>
      <h1>Why tokens were computed</h1>
      <p>
        kvtier counts each prompt token either as a hit in a tier, or as computed for one of these reasons. The names
        are those of the dashboard, of <code>/metrics</code> and of the request log.
      </p>
{items}
    </main>
  </body>
</html>
""".encode()
