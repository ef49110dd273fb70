"""The progress bar of the reference trainer, for a person at its terminal. Log lines appear above it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


@contextmanager
def progress_bar(steps: int, done: int, *, is_shown: bool) -> Iterator[Callable[[int, float, float], None]]:
    """Show a bar from step `done` to `steps` if `is_shown` and the standard error is a terminal.

    Yields a function that moves the bar to a step, and shows the mean reward and the trained tokens per second.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda _step, _reward, _tokens_per_s: None
        return
    with logging_redirect_tqdm(), tqdm(total=steps, initial=done, desc="train", unit="step", dynamic_ncols=True) as bar:

        def show(step: int, reward: float, tokens_per_s: float) -> None:
            bar.set_postfix_str(f"reward {reward:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            bar.update(step - bar.n)

        yield show
