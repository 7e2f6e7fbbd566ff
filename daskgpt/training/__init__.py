"""From a job to a trained model: steps, the loop, the run folder."""
