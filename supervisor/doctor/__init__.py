"""`meshlm doctor`: what it looks at, one module for each kind of thing. cli/doctor.py asks and prints."""
