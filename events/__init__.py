"""The events of unicrond: vocabulary, codec and logs; what all of its parts agree on."""

PROJECT = "unicrond"
