"""The form of prompts: the text before and after what a user writes."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from daskgpt.config.errors import require

PLACE = "{}"


class PromptForm(NamedTuple):
    r"""The text before and after what a user writes; both are empty where there is no form.

    >>> form = PromptForm.of(["Q: Is 1 odd?\nA:", "Q: Is 2 odd?\nA:", "Q: Who are you?\nA:"])
    >>> form
    PromptForm(before='Q: ', after='?\nA:')
    >>> form.around("Is 3 odd") == form.around("Is 3 odd?") == form.around("Q: Is 3 odd?\nA:") == "Q: Is 3 odd?\nA:"
    True
    """

    before: str = ""
    after: str = ""

    @classmethod
    def of(cls, prompts: Sequence[str]) -> PromptForm:
        """Return what all prompts have in common at their beginnings and ends, without parts of words."""
        if len(set(prompts)) < 2:
            return cls()
        before = commonprefix(prompts)  # noqa: RUF071  of characters
        after = commonprefix([prompt[len(before) :][::-1] for prompt in prompts])[::-1]  # noqa: RUF071
        while before and before[-1].isalnum():
            before = before[:-1]
        while after and after[0].isalnum():
            after = after[1:]
        return cls(before, after)

    @classmethod
    def of_template(cls, template: str) -> PromptForm:
        """Return the form of a text in which {} is the place of what a user writes.

        Errors   ValueError unless there is one such place
        """
        rule, advice = f"a template must have one {PLACE}", "It stands for what you write."
        require(template.count(PLACE) == 1, "generate", rule, {"template": template}, advice)
        return cls(*template.split(PLACE))

    @classmethod
    def of_state(cls, texts: Any) -> PromptForm:
        """Return the form that a checkpoint's state has; none for anything else."""
        good = isinstance(texts, list) and len(texts) == 2 and all(isinstance(text, str) for text in texts)
        return cls(*texts) if good else cls()

    def around(self, text: str) -> str:
        """Return the prompt for a text, which may have a part of the form, or all of it, already."""
        ends = (n for n in range(len(text), 0, -1) if not text[n - 1].isalnum() and self.before.endswith(text[:n]))
        text = text[next(ends, 0) :]
        starts = (n for n in range(len(text)) if not text[n].isalnum() and self.after.startswith(text[n:]))
        return self.before + text[: next(starts, len(text))] + self.after
