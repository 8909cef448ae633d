package redlock_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

// counted is a proxy in front of a gateway that counts the renewals.
type counted struct {
	URL string
	// joint counts PATCH /locks, and single PATCH /locks/{name}.
	joint, single atomic.Int64
	// While hangs is set, the proxy answers no PATCH /locks. givenUp counts those that the client gave up.
	hangs   atomic.Bool
	givenUp atomic.Int64
	// first replaces the first result of the next answer to PATCH /locks.
	first atomic.Pointer[api.ExtendResult]
}

// count starts a proxy. It answers PATCH /locks with a status of its own, unless that is 0.
func (s *servers) count(status int) *counted {
	s.t.Helper()
	gateway, err := url.Parse(s.Gateways[0])
	must(s.t, err)
	pass := httputil.NewSingleHostReverseProxy(gateway)
	c := &counted{}
	pass.ModifyResponse = c.replace
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		isJoint := request.Method == http.MethodPatch && request.URL.Path == "/locks"
		switch {
		case isJoint:
			c.joint.Add(1)
		case request.Method == http.MethodPatch:
			c.single.Add(1)
		}
		switch {
		case isJoint && status != 0:
			w.WriteHeader(status)
		case isJoint && c.hangs.Load():
			_, _ = request.Body.Read(make([]byte, 1<<20))
			<-request.Context().Done()
			c.givenUp.Add(1)
		default:
			pass.ServeHTTP(w, request)
		}
	}))
	s.t.Cleanup(proxy.Close)
	c.URL = proxy.URL
	return c
}

func (c *counted) replace(response *http.Response) error {
	if response.Request.Method != http.MethodPatch || response.Request.URL.Path != "/locks" {
		return nil
	}
	first := c.first.Swap(nil)
	if first == nil {
		return nil
	}
	var answer api.ExtendManyResults
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return err
	}
	first.Name = answer.Results[0].Name
	answer.Results[0] = *first
	body, err := json.Marshal(answer)
	response.Body = io.NopCloser(bytes.NewReader(body))
	response.ContentLength = int64(len(body))
	response.Header.Set("Content-Length", fmt.Sprint(len(body)))
	return err
}

func lockMany(t *testing.T, client *redlock.Client, count int, options ...redlock.Option) []*redlock.Guard {
	t.Helper()
	guards := make([]*redlock.Guard, count)
	for at := range guards {
		guards[at] = lock(t, client, fmt.Sprintf("jobs/%d", at), append(options, kept)...)
	}
	t.Cleanup(func() {
		for _, guard := range guards {
			must(t, guard.Release(background))
		}
	})
	return guards
}

// allExtended waits until each guard has had so many extensions.
func allExtended(t *testing.T, guards []*redlock.Guard, times int) {
	t.Helper()
	for range times {
		before := make([]time.Duration, len(guards))
		for at, guard := range guards {
			before[at] = guard.Deadline()
		}
		eventually(t, "an extension of each lock", func() bool {
			isDone := true
			for at, guard := range guards {
				must(t, guard.Check())
				isDone = isDone && guard.Deadline() > before[at]
			}
			return isDone
		})
	}
}

func TestFiftyGuardsOfOneClientRenewTogether(t *testing.T) {
	t.Parallel()
	s := start(t)
	proxy := s.count(0)
	guards := lockMany(t, s.client(proxy.URL), 50)
	extended(t, guards[0], 1)
	joint, single := proxy.joint.Load(), proxy.single.Load()
	for begin := guards[0].Deadline(); guards[0].Deadline()-begin < 3*ttl; {
		extended(t, guards[0], 1)
	}
	joint, single = proxy.joint.Load()-joint, proxy.single.Load()-single
	t.Logf("%d joint requests and %d single ones for 50 guards in 3 TTLs", joint, single)
	// One by one it would be 450 and more. Guards acquired one after the other form a few groups.
	if joint == 0 || joint+single > 100 {
		t.Errorf("%d joint requests and %d single ones", joint, single)
	}
	for _, guard := range guards {
		must(t, guard.Check())
	}

	s.takeAway(guards[7])
	closed(t, "the loss", guards[7].Lost())
	if loss := lossOf(t, guards[7].Check()); loss.Reason != redlock.Gone || loss.Name != "jobs/7" {
		t.Error(loss)
	}
	allExtended(t, append(guards[:7:7], guards[8:]...), 1)
}

func TestGuardsRenewAloneAtAGatewayThatCannotExtendMany(t *testing.T) {
	t.Parallel()
	s := start(t)
	for _, status := range []int{http.StatusNotFound, http.StatusMethodNotAllowed} {
		proxy := s.count(status)
		guards := lockMany(t, s.client(proxy.URL), 5, redlock.Metadata(map[string]string{"status": fmt.Sprint(status)}))
		allExtended(t, guards, 3)
		// Groups that are due at the same time may each ask once before the first answer.
		if joint := proxy.joint.Load(); joint == 0 || joint > 3 {
			t.Errorf("%d joint requests", joint)
		}
		for _, guard := range guards {
			must(t, guard.Release(background))
		}
	}
}

func TestAHungJointRenewalLosesNoLockAndHoldsUpNoRelease(t *testing.T) {
	t.Parallel()
	s := start(t)
	proxy := s.count(0)
	guards := lockMany(t, s.client(proxy.URL), 5)
	proxy.hangs.Store(true)
	// On a busy machine the joint renewal may be given up while the release is under way.
	eventually(t, "a release during a joint renewal", func() bool {
		joint := proxy.joint.Load()
		eventually(t, "a joint renewal", func() bool { return proxy.joint.Load() > joint })
		givenUp := proxy.givenUp.Load()
		released := guards[0]
		must(t, released.Release(background))
		isInTime := proxy.givenUp.Load() == givenUp
		if released.Check() != redlock.ErrReleased {
			t.Error(released.Check())
		}
		guards[0] = lock(t, s.client(proxy.URL), "jobs/0", kept)
		return isInTime
	})
	allExtended(t, guards[1:], 1)
}

func TestEachResultCountsAsTheAnswerToItsOwnRequest(t *testing.T) {
	t.Parallel()
	s := start(t)
	proxy := s.count(0)
	guards := lockMany(t, s.client(proxy.URL), 5)
	text := func(text string) *string { return &text }
	used := func() bool { return proxy.first.Load() == nil }
	proxy.first.Store(&api.ExtendResult{Status: 503, Code: text("outcome_unknown"), Detail: text("ask again")})
	eventually(t, "a joint renewal", used)
	allExtended(t, guards, 1)

	proxy.first.Store(&api.ExtendResult{Status: 409, Code: text("not_holder"), Detail: text("d"), Holder: text("mallory")})
	eventually(t, "a joint renewal", used)
	var held []*redlock.Guard
	eventually(t, "a loss", func() bool {
		held = nil
		for _, guard := range guards {
			if guard.Check() == nil {
				held = append(held, guard)
			} else if loss := lossOf(t, guard.Check()); loss.Reason != redlock.Taken || loss.Holder != "mallory" {
				t.Fatal(loss)
			}
		}
		return len(held) < len(guards)
	})
	if len(held) != len(guards)-1 {
		t.Errorf("%d of %d guards hold their locks", len(held), len(guards))
	}
	allExtended(t, held, 1)
}

func TestGuardsWithDifferentTTLsRenewInDifferentRequests(t *testing.T) {
	t.Parallel()
	s := start(t)
	proxy := s.count(0)
	client := s.client(proxy.URL)
	guards := []*redlock.Guard{lock(t, client, "a", kept), lock(t, client, "b", redlock.TTL(ttl+time.Millisecond))}
	allExtended(t, guards, 2)
	if joint := proxy.joint.Load(); joint != 0 {
		t.Errorf("%d joint requests", joint)
	}
	for _, guard := range guards {
		must(t, guard.Release(background))
	}
}
