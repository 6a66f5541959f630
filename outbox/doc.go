// Package outbox is the authority for what leaves grantd: it takes the deliveries that the store committed with each ledger entry
// to their destinations, at least once, and records what came of every attempt.
//
// An attempt is recorded before the call is made, and its result after. A worker that dies in between leaves a lease, and once that
// has run out the delivery is made again with the same key and the same bytes where the destination deduplicates, and waits as UNKNOWN
// where it does not. Which deliveries are due, and in what order, is the store's to say; what an answer means, when the next
// attempt is, and whether a destination is down as a whole is decided here.
//
// Any number of replicas run side by side. They share nothing but the database, whose clock alone decides what is due.
package outbox
