"""What is made of a log: states, stories, timelines, differences, decisions made again."""
