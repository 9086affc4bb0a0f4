"""The log line that tells every 10 seconds of activity what the engine does."""

from __future__ import annotations

import asyncio
import copy
import logging
from time import monotonic

from foredraft.engine.stats import AcceptanceStats
from foredraft.serve.state import ServerState

INTERVAL = 10.0

log = logging.getLogger(__name__)


async def log_activity(state: ServerState, interval: float = INTERVAL) -> None:
    """Logs until it is cancelled; nothing while there is nothing to do."""
    engine = state.llm.engine
    before, since = copy.copy(engine.stats), monotonic()
    tokens_before = state.metrics.num_generated
    while True:
        await asyncio.sleep(interval)
        stats, now, tokens = copy.copy(engine.stats), monotonic(), state.metrics.num_generated
        if tokens > tokens_before or engine.scheduler.has_unfinished:
            log.info(activity_line(state, before, stats, (tokens - tokens_before) / (now - since)))
        before, since, tokens_before = stats, now, tokens


def activity_line(state: ServerState, before: AcceptanceStats, after: AcceptanceStats, rate: float) -> str:
    """One line on the time between two counts."""
    scheduler = state.llm.engine.scheduler
    steps = after.num_steps - before.num_steps
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    emitted = after.num_emitted_tokens - before.num_emitted_tokens
    line = f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}, {rate:.1f} tokens/s"
    if not state.llm.drafter_name:
        return f"{line}, no speculation"
    acceptance = f"{accepted / drafted:.1%}" if drafted else "none drafted"
    length = emitted / steps if steps else 0.0
    chosen = drafted / steps if steps else 0.0
    return f"{line}, acceptance rate {acceptance}, mean acceptance length {length:.2f}, chosen γ {chosen:.1f}"
