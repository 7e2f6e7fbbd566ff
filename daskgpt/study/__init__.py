"""The study: one model under many settings of its dataflow, measured, drawn and put into words."""
