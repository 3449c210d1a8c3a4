package fleet

import "lull/internal/store"

// EntryOps returns the writes of an audit entry for a change made outside this
// package, such as a token, in the same transaction. A zero At is now.
func EntryOps(e Entry) ([]store.Op, error) { return entryOps(e) }
