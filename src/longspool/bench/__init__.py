"""Measuring a recipe on the user's own machine: real texts, needles, and what each method has to show."""
