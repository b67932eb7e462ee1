"""Fields: differential operators of functions of coordinates."""
