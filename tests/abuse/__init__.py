"""Bad input of every kind, for every argument of every public name: an error of ours, or a right answer."""
