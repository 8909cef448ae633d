package redlock

import (
	"context"
	"time"
)

// moment is a point on a clock that nobody sets and that, on Linux, goes on while the machine sleeps: after a suspended night a
// lock is known to be lost. A time.Time stands still then.
type moment time.Duration

// Timers stand still while the machine sleeps; so a long pause is slept in pieces of this length.
const piece = 500 * time.Millisecond

var processStart = time.Now()

func monotonic() moment {
	return moment(time.Since(processStart))
}

func (m moment) add(d time.Duration) moment {
	return m + moment(d)
}

// since is how long after the earlier one it is; negative when it is before.
func (m moment) since(earlier moment) time.Duration {
	return time.Duration(m - earlier)
}

// left is how long it is until then; nothing when it has passed.
func (m moment) left() time.Duration {
	return max(0, m.since(now()))
}

func (m moment) hasPassed() bool {
	return m.left() == 0
}

// reached waits until it has come, also when the machine has slept meanwhile; false when ctx ended before.
func (m moment) reached(ctx context.Context) bool {
	for {
		left := m.left()
		if left == 0 {
			return ctx.Err() == nil
		}
		if !sleep(ctx, min(left, piece)) {
			return false
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
