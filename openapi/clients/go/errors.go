package redlock

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

// ErrReleased is the cause of a guard's context after [Guard.Release]. [Guard.Check] then returns
// it.
var ErrReleased = errors.New("the lock was released by its guard")

// Problem is a gateway's error answer (RFC 9457).
type Problem struct {
	// Status is the HTTP status.
	Status int
	// Code is the kind of problem, for programs: "invalid_ttl". It is "proxy" or "not_a_gateway" if
	// something other than a gateway answered.
	Code string
	// Detail says what happened, with the value and what is allowed.
	Detail string
	// RequestID identifies the request in the gateway's log; empty if unknown.
	RequestID string
	// Holder is the holder's label; empty if there is none.
	Holder string
	// ExpiresIn is when the holder's lock expires unless it is extended; 0 if unknown.
	ExpiresIn time.Duration
	// RetryAfter is when trying again makes sense; 0 if unknown.
	RetryAfter time.Duration
	// AcquiredAt is since when the holder has the lock; zero if unknown.
	AcquiredAt time.Time
	// Holders are the holders of the slots that are taken, by slot; nil for a lock without [Slots].
	Holders []SlotHolder
	// Held is the lock that kept a set from being granted; others of the set may be held too.
	Held []HeldLock
	// QueuePosition is the place of this request in this gateway's line for the lock; 1 is next, 0
	// is unknown.
	QueuePosition int
	// QueuePlaceExpires is how long the gateway keeps that place; 0 if it keeps none.
	QueuePlaceExpires time.Duration
}

// SlotHolder is the holder of one slot of a lock. What the gateway does not say is the zero value.
type SlotHolder struct {
	// Slot is the number of the slot, from 1.
	Slot int
	// Holder is the holder's label.
	Holder string
	// FencingToken is the holder's fencing token; 0 in a [*HeldError].
	FencingToken int64
	// ExpiresIn is when the slot is free unless it is extended.
	ExpiresIn time.Duration
	// AcquiredAt is since when the holder has the slot.
	AcquiredAt time.Time
}

// HeldLock is a held lock that kept a set from being granted.
type HeldLock struct {
	// Name is the lock's name.
	Name string
	// Holder is the holder's label; empty if there is none.
	Holder string
	// ExpiresIn is when the holder's lock expires unless it is extended; 0 if unknown.
	ExpiresIn time.Duration
}

func heldLocks(answer []api.HeldLock) []HeldLock {
	var locks []HeldLock
	for _, each := range answer {
		locks = append(locks, HeldLock{
			Name: each.Name, Holder: valueOf(each.Holder), ExpiresIn: milliseconds(valueOf(each.ExpiresInMs)),
		})
	}
	return locks
}

func slotHolders(answer []api.SlotHolder) []SlotHolder {
	var holders []SlotHolder
	for _, each := range answer {
		holders = append(holders, SlotHolder{
			Slot: int(each.Slot), Holder: valueOf(each.Holder), FencingToken: valueOf(each.FencingToken),
			ExpiresIn: milliseconds(valueOf(each.ExpiresInMs)), AcquiredAt: valueOf(each.AcquiredAt),
		})
	}
	return holders
}

// String returns code, status and detail, for people.
func (p Problem) String() string {
	return fmt.Sprintf("%s (%d): %s", p.Code, p.Status, p.Detail)
}

// HeldError reports that somebody else held the lock until the wait ended.
type HeldError struct {
	// Name is the name of the lock. For a set it has all names, separated by commas.
	Name string
	Problem
}

func (e *HeldError) Error() string {
	return about(e.Name, e.String())
}

// RefusedError reports that the gateway refuses the request; a repetition would be refused too.
// Detail says what is allowed.
type RefusedError struct {
	// Name is the name of the lock. For a set it has all names, separated by commas. It is empty
	// if the request was about no lock in particular.
	Name string
	Problem
}

func (e *RefusedError) Error() string {
	return about(e.Name, e.String())
}

// UnavailableError reports that no gateway decided.
type UnavailableError struct {
	// Name is the name of the lock. For a set it has all names, separated by commas. It is empty
	// if the request was about no lock in particular.
	Name string
	// What is the last answer or failure of each URL.
	What []string
	// Last is the last answer of a gateway; nil if there was none.
	Last *Problem
}

func (e *UnavailableError) Error() string {
	return about(e.Name, "no gateway decided: "+strings.Join(e.What, "; "))
}

// SetupError reports that an argument cannot work; no request was sent.
type SetupError struct {
	// What describes the error, with the value.
	What string
}

func (e *SetupError) Error() string {
	return e.What
}

// LossReason is the reason why a lock was lost, for programs.
type LossReason string

const (
	// Gone means that the lock is free: somebody else released it, or it has expired.
	Gone LossReason = "gone"
	// Taken means that somebody else holds the lock.
	Taken LossReason = "taken"
	// MaxHold means that the lock was held for the longest time that is allowed.
	MaxHold LossReason = "max_hold"
	// Unconfirmed means that no gateway confirmed an extension, and the deadline is near or has
	// passed.
	Unconfirmed LossReason = "unconfirmed"
)

// LostError reports that a lock is no longer held, or may no longer be held. It is then the cause
// of the guard's context.
type LostError struct {
	// Name is the name of the lock. Of a set it is the lock that was lost, or all names with the reason
	// Unconfirmed.
	Name string
	// Reason is the kind of loss, for programs.
	Reason LossReason
	// Detail is the answer of the gateways.
	Detail string
	// Holder is the label of the new holder, with the reason Taken; empty if unknown.
	Holder string
}

func (e *LostError) Error() string {
	why := map[LossReason]string{
		Gone:        "it was released by somebody else or has expired",
		Taken:       labelOf(e.Holder) + " holds it",
		MaxHold:     "it was held for the longest time that is allowed",
		Unconfirmed: "no gateway has confirmed an extension before its deadline",
	}[e.Reason]
	return fmt.Sprintf("the lock %q was lost: %s (%s)", e.Name, why, e.Detail)
}

// about puts the name of the lock in front, if there is one.
func about(name, text string) string {
	if name == "" {
		return text
	}
	return fmt.Sprintf("lock %q: %s", name, text)
}

func labelOf(holder string) string {
	if holder == "" {
		return "somebody else"
	}
	return fmt.Sprintf("%q", holder)
}

// isLoss reports whether the problem means that a token no longer holds its lock. The code decides,
// because a proxy's error page has a status too.
func (p Problem) isLoss() bool {
	return p.Code == "lock_not_found" || p.Code == "not_holder" || p.Code == "max_hold_reached"
}

func (p Problem) asLoss(name string) *LostError {
	reason := Taken
	switch p.Code {
	case "lock_not_found":
		reason = Gone
	case "max_hold_reached":
		reason = MaxHold
	}
	return &LostError{Name: name, Reason: reason, Detail: p.Detail, Holder: p.Holder}
}
