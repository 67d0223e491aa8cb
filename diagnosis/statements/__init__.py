"""What several causes say in the same words, by what it is about."""
