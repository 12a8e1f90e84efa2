"""Turns records into tables, pictures and one self-contained page; `python -m bench.report RECORDS...`."""
