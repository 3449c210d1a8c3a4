package fleet

import "lull/internal/store"

// EntryOp is the write of an audit entry for a change that is made outside
// this package, in the same transaction: tokens, for one. At is now if it is
// zero.
func EntryOp(e Entry) (store.Op, error) { return entryOp(e) }
