// Package redlock holds locks of a redlock-gateway: it acquires a lock, extends it while work goes
// on, and reports a loss at once.
//
//	client, err := redlock.New(redlock.Config{URLs: []string{"http://127.0.0.1:8080"}})
//	…
//	err = client.WithLock(ctx, "reports/nightly", func(ctx context.Context, guard *redlock.Guard) error {
//		return write(ctx, guard.FencingToken()) // ctx is cancelled when the lock is lost
//	}, redlock.TTL(30*time.Second), redlock.Wait(time.Minute))
//
// A guard is extended at a third of its validity:
//
//	          acquire                 a third of the validity          margin
//	sent ───────┬──────────────────────────────┬──────────────────────────┬──────┬─► time
//	            │ guard                        │ PATCH: a new deadline    │ lost │ deadline
//	                                           └─ 404, 409: lost now
//
// If a lock cannot be extended, its guard reports the loss a margin before anybody else can be
// granted the lock. If a lock is taken away (by force, or by its token), the guard reports the loss
// at the next extension; the lock may be another's by then. A guard cannot stop work that does not
// check it. Give [Guard.FencingToken] to each resource you write to, and let the resource refuse
// smaller tokens.
//
// Package api, below this one, is the generated client of every operation, without a guard.
package redlock
