package store

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Delivery is one event bound for one destination.
type Delivery struct {
	TenantID string
	// ID is made from the key: whoever has one finds the delivery.
	ID uuid.UUID
	// Key is the delivery key, 64 hexadecimal digits: one per entry and destination, the same on every attempt and redelivery.
	Key string
	// Destination is a name, also of one that is configured no more.
	Destination string
	State       entitlementv1.DeliveryState
	// Attempts is how many are on record, whether their calls were made or not; in what Claim returns, the number of this one.
	Attempts int64
	// Repeated says, in what Claim returns, that the lease of the call before ran out without a result: the destination may have it.
	Repeated bool
	// Poison is how many of them failed in a way that counts against the limit.
	Poison int64
	// NextAttemptAt is when a PENDING delivery is due, and when an UNKNOWN one may be asked about, in database time.
	NextAttemptAt time.Time
	// LeaseUntil is when the lease of a SENDING delivery ends, in database time; nil in other states.
	LeaseUntil *time.Time
	// LeaseToken is that of the latest claim.
	LeaseToken uuid.UUID
	// LastError is at most 1 KiB.
	LastError string
	CreatedAt time.Time
	SettledAt *time.Time
	// ContentType and BodyBytes, the body's size, are empty and 0 while there is no body: one that is not made with the entry is made by the
	// first claim.
	ContentType string
	BodyBytes   int64
	// Body is set in what Claim returns: the same bytes on every attempt. It is kept for as long as it may be sent.
	Body []byte
	// Notify and Template say who is sent which mail, for a destination that notifies; nil and empty otherwise.
	Notify   *Notify
	Template string
	// HeldBy is the number of the lowest earlier entry of the entitlement that is not settled at this destination, 0 for none.
	HeldBy int64
	// Event is, in what Claim returns, what the claim has read: always the names of the entry, its kind, and its operation's key, event and
	// trace; all of it where the claim had to make the body.
	Event *Event

	// place is where the claim left the row.
	place pgtype.TID
	// rendered says that the claim has made the body.
	rendered bool
}

// Event is the ledger entry on its way out.
type Event struct {
	Entry Entry
	// Entitlement is as of the entry.
	Entitlement Entitlement
	// Operation is what appended the entry: its key, its origin and its trace.
	Operation Operation
}

// DeliveryAttempt is one call to a destination, recorded before it is made.
type DeliveryAttempt struct {
	Number    int64
	Worker    string
	StartedAt time.Time
	// EndedAt is nil while no result is recorded.
	EndedAt    *time.Time
	Outcome    entitlementv1.DeliveryAttemptOutcome
	StatusCode int
	Error      string
	Note       string
}

// OperatorAction is what an operator did to a delivery. It outlives the delivery.
type OperatorAction struct {
	Kind entitlementv1.OperatorActionKind
	// Attempts is how many the delivery had then.
	Attempts int64
	From, To entitlementv1.DeliveryState
	Actor    string
	Reason   string
	Caller   string
	At       time.Time
}

// DeliveryStory is a delivery with all that was tried and done about it.
type DeliveryStory struct {
	Delivery *Delivery
	Attempts []DeliveryAttempt
	Actions  []OperatorAction
}

// DeliveryName names a delivery of a tenant by its id or, when that is zero, by its entry and destination.
type DeliveryName struct {
	ID            uuid.UUID
	EntitlementID uuid.UUID
	EntryNumber   int64
	Destination   string
}

// deliveryKey is one per effect and destination. Every part is preceded by its length, so that no two lists of parts meet. It is
// what destinations deduplicate by, and never changes.
func deliveryKey(tenant string, b BusinessKey, entryNumber int64, destination string) [sha256.Size]byte {
	e := make(encoding, 0, payloadBytes)
	e = e.chunk("grantd.delivery.1").chunk(tenant).chunk(b.InvoiceID).chunk(b.EntitlementType)
	e = binary.BigEndian.AppendUint64(e, uint64(b.OperationVersion))
	e = binary.BigEndian.AppendUint64(e, uint64(entryNumber))
	return sha256.Sum256(e.chunk(destination))
}

// deliveryID is a UUID of version 8 that holds the beginning of the key.
func deliveryID(key [sha256.Size]byte) uuid.UUID {
	id := uuid.UUID(key[:16])
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

// DeliveryIDOf returns the id of the delivery that has the key, and false for what is no key.
func DeliveryIDOf(key string) (uuid.UUID, bool) {
	raw, err := hex.DecodeString(key)
	if err != nil || len(raw) != sha256.Size || hex.EncodeToString(raw) != key {
		return uuid.UUID{}, false
	}
	return deliveryID([sha256.Size]byte(raw)), true
}
