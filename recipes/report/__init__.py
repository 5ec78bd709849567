"""`python -m recipes report RUN [RUN ...]`: runs side by side, from the files of their folders.

reading.py   a run folder -> columns            figures.py  columns -> the rows of the table
curves.py    columns -> few points for a plot    svg.py      points -> one picture
page.py      everything as one HTML file         text.py     the table as Markdown and as JSON
"""
