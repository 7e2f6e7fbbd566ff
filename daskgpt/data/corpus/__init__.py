"""From files of text to folders of tokens, of any size: what `daskgpt.prepare` does."""
