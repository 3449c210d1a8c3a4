package fleet

import "lull/internal/store"

// EntryOps are the writes of an audit entry for a change that is made outside
// this package, in the same transaction: tokens, for one. At is now if it is
// zero.
func EntryOps(e Entry) ([]store.Op, error) { return entryOps(e) }
