"""From files of text to folders of tokens, of any size, for `daskgpt.prepare`."""
