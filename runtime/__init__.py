"""A run from its command line to its folder; it knows of no algorithm, and of no model's inside.

Before a step: settings.py has the flags, data.py what is trained on and what judges it, ranks.py
the processes of torchrun. On disk: folder.py has the beginning, checkpoints and resumes, record.py
numbers and pictures, trackers.py and model_card.py what goes to others. For people: numbers.py says
what each number is and how it is printed, evaluation.py what was learned, clock.py where a run is
now, terminal.py lines and errors. viewer/ draws a run from its folder.
"""
