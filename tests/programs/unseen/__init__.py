"""Programs after public reports, whose expected explanations were written before the first run."""
