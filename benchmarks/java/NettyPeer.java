import io.netty.util.HashedWheelTimer;
import io.netty.util.Timeout;
import io.netty.util.TimerTask;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.lang.reflect.Field;
import java.util.Queue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/**
 * Netty's HashedWheelTimer, tick 1 ms, 512 slots: one wheel with rounds, and a thread that turns it.
 *
 * <p>newTimeout() and cancel() only queue a request; the wheel's thread handles it at its
 * next tick. Settling waits for that, so its figures count until in the wheel, or out of it.
 */
final class NettyPeer extends Peer {
    private static final TimerTask NOTHING = timeout -> {};
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    private HashedWheelTimer timer;
    private Queue<?> added;
    private Queue<?> cancelled;
    private Thread worker;

    @Override
    void open() {
        timer = new HashedWheelTimer(1, TimeUnit.MILLISECONDS, 512);
        added = (Queue<?>) field("timeouts");
        cancelled = (Queue<?>) field("cancelledTimeouts");
        worker = (Thread) field("workerThread");
        timer.start();
    }

    private Object field(String name) {
        try {
            Field field = HashedWheelTimer.class.getDeclaredField(name);
            field.setAccessible(true);
            return field.get(timer);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this Netty has no field called " + name, error);
        }
    }

    @Override
    Object schedule(int delayMs) {
        return timer.newTimeout(NOTHING, delayMs, TimeUnit.MILLISECONDS);
    }

    @Override
    void cancel(Object handle) {
        ((Timeout) handle).cancel();
    }

    @Override
    boolean settles() {
        return true;
    }

    @Override
    void settle() {
        while (!added.isEmpty() || !cancelled.isEmpty()) {
            Thread.onSpinWait();
        }
    }

    @Override
    long helperNs() {
        return THREADS.getThreadCpuTime(worker.getId());
    }

    /** The wheel's thread is held by a first task, once all are in, until all the others are due. */
    @Override
    long expire(int[] delaysMs) throws Exception {
        open();
        int headStartMs = 300 + delaysMs.length / 1_000;
        Fired fired = new Fired(delaysMs.length);
        TimerTask task = timeout -> fired.add();
        CountDownLatch hold = new CountDownLatch(1);
        timer.newTimeout(timeout -> hold.await(), headStartMs - 50, TimeUnit.MILLISECONDS);
        for (int delayMs : delaysMs) {
            timer.newTimeout(task, headStartMs + delayMs, TimeUnit.MILLISECONDS);
        }
        Thread.sleep(headStartMs + EXPIRE_MS + 50);
        long started = System.nanoTime();
        hold.countDown();
        fired.await();
        long elapsed = System.nanoTime() - started;
        close();
        return elapsed;
    }

    @Override
    void close() {
        settle();
        timer.stop();
    }

    public static void main(String[] arguments) throws Exception {
        new NettyPeer().run(arguments);
    }
}
